"""Measurement of the time that each call of a stage's loop takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import stage_profiler
    from .stage_profiler import Profiled, measured_in

__getattr__, __dir__, __all__ = lazy_exports(__name__)
