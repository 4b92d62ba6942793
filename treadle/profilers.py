"""What ``Trainer(profiler=...)`` takes: names, nothing else."""

from .common.peer_names import find_peer_names
from .engine import profilers
from .engine.profilers import *  # noqa: F403

__all__ = list(profilers.__all__)

__getattr__ = find_peer_names(__name__)
