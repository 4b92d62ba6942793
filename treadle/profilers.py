"""Profilers for ``Trainer(profiler=...)``."""

from .common.peer_names import find_peer_names
from .engine.profilers import (
    AdvancedProfiler,
    PassThroughProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
    choose_profiler,
    profile,
)

__all__ = [
    "AdvancedProfiler",
    "PassThroughProfiler",
    "Profiler",
    "PyTorchProfiler",
    "SimpleProfiler",
    "choose_profiler",
    "profile",
]

__getattr__ = find_peer_names(__name__)
