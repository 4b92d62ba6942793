"""Shards: every rank holds a share of each parameter (FSDP2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .fsdp import FSDP
    from .fsdp import FSDP as FSDPStrategy
    from .fsdp import FSDP as ModelParallelStrategy
    from .recompute import Recompute

__getattr__, __dir__, __all__ = lazy_exports(__name__)
