"""Logged values, which are sent to the loggers and kept in the run's history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .callback_metrics import collect_callback_metrics, tensors_by_name
    from .history import History
    from .metric_logger import LatestValidation, Logbook, SilentLogger, choose_metrics

__getattr__, __dir__, __all__ = lazy_exports(__name__)
