"""Throughput of a run, and the peak FLOPS of its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .peak_flops import get_available_flops
    from .throughput import Throughput

__getattr__, __dir__, __all__ = lazy_exports(__name__)
