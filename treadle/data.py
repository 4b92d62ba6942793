"""Datasets and batch samplers for sequences of different lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .engine.data.sequences import (
        BudgetBatchSampler,
        PackedDataset,
        PackedStream,
        make_flex_mask,
        make_sdpa_mask,
        pack,
    )

__getattr__, __dir__, __all__ = lazy_exports(__name__)
