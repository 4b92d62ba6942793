"""Profilers that measure how a run spends its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .advanced import AdvancedProfiler
    from .events import EventProfiler
    from .profiler import PassThroughProfiler, Profiler, choose_profiler
    from .pytorch import PyTorchProfiler, profile
    from .simple import SimpleProfiler

__getattr__, __dir__, __all__ = lazy_exports(__name__)
