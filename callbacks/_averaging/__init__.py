"""Helpers for the callbacks that average weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .averaged_weights import KEYS, Average, Averages, average_equally, find_saved_averages, lerp, wrap_avg_fn
    from .base import Averaging
    from .batch_norm import measure

__getattr__, __dir__, __all__ = lazy_exports(__name__)
