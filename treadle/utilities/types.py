"""What scripts import from ``lightning.pytorch.utilities.types`` for their annotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..trainer.core import SchedulerConfig as LRSchedulerConfig

STEP_OUTPUT = Tensor | Mapping[str, Any] | None
"""What a step returns."""

TRAIN_DATALOADERS = EVAL_DATALOADERS = Any
"""A loader, or a collection of them."""

OptimizerLRScheduler = OptimizerLRSchedulerConfig = OptimizerConfig = LRSchedulerConfigType = Any
"""What ``configure_optimizers`` returns, or a part of it: a `SchedulerConfig` says what may be in it."""

LRSchedulerTypeUnion = LRSchedulerType = LRScheduler | ReduceLROnPlateau

_METRIC = Tensor | int | float
"""A logged value."""

__all__ = [
    "DistributedDataParallel",
    "EVAL_DATALOADERS",
    "LRSchedulerConfig",
    "STEP_OUTPUT",
    "TRAIN_DATALOADERS",
    "LRSchedulerConfigType",
    "LRSchedulerType",
    "LRSchedulerTypeUnion",
    "OptimizerConfig",
    "OptimizerLRScheduler",
    "OptimizerLRSchedulerConfig",
]
