"""What ``Trainer(profiler=...)`` takes: names, nothing else."""

from .engine import profilers as _home
from .engine.profilers import *  # noqa: F403

__all__ = list(_home.__all__)
