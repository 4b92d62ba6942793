"""Sharding with FSDP2: each rank holds a shard of each parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .fsdp import FSDP
    from .lightning_strategy import FSDPStrategy, choose_sharding, is_offload
    from .lightning_strategy import FSDPStrategy as ModelParallelStrategy
    from .recompute import Recompute

__getattr__, __dir__, __all__ = lazy_exports(__name__)
