"""What ``Trainer(profiler=...)`` takes: names, nothing else."""

from .engine import profilers
from .engine.profilers import *  # noqa: F403

__all__ = list(profilers.__all__)
