"""Profilers for ``Trainer(profiler=...)``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .engine.profilers import (
        AdvancedProfiler,
        EventProfiler,
        PassThroughProfiler,
        Profiler,
        PyTorchProfiler,
        SimpleProfiler,
        choose_profiler,
        profile,
    )

__getattr__, __dir__, __all__ = lazy_exports(__name__)
