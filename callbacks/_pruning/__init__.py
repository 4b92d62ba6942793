"""Helpers for the pruning callbacks: pruned parameters and their masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .pruned_parameter import PrunedParameter, collect_masks, find_prunable

__getattr__, __dir__, __all__ = lazy_exports(__name__)
