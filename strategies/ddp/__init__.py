"""Replicas: every rank holds the full model, and gradients are averaged over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .batch_norm import TorchSyncBatchNorm
    from .coalesced import average
    from .ddp import DDP, make_ddp_factory
    from .ddp import DDP as DDPStrategy

__getattr__, __dir__, __all__ = lazy_exports(__name__)
