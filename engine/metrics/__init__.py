"""Reduction of logged values over steps and ranks, and the state of metric objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import metric_state
    from .exact_values import ExactMetrics
    from .logged_values import AsyncNumbers, Metrics, MutedMetrics, is_wide, read_numbers
    from .metric_state import uneven_counts

__getattr__, __dir__, __all__ = lazy_exports(__name__)
