"""Sequences of different lengths: packed into rows of one length, or in batches limited by a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .budget import BudgetBatchSampler, OverBudgetError
    from .masks import make_flex_mask, make_sdpa_mask
    from .packing import PackedDataset, PackedStream, pack

__getattr__, __dir__, __all__ = lazy_exports(__name__)
