"""Sweeps: trials of one configuration with different values. Trials are resumable runs and can run in parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .assignment import Assignment
    from .scheduler import Scheduler
    from .sweep_file import KEYS, Sweep, read_sweep
    from .trial import TrialCallback, trial_of
    from .trial_config import TrialConfigs
    from .workers import Workers

__getattr__, __dir__, __all__ = lazy_exports(__name__)
