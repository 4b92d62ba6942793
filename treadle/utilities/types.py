"""Types that scripts import from ``lightning.pytorch.utilities.types`` for their annotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..trainer.core import SchedulerConfig as LRSchedulerConfig

STEP_OUTPUT = Tensor | Mapping[str, Any] | None
"""Return value of ``training_step`` and the other steps: the loss, a dict, or None."""

TRAIN_DATALOADERS = EVAL_DATALOADERS = Any
"""Dataloader or collection of dataloaders."""

OptimizerLRScheduler = OptimizerLRSchedulerConfig = OptimizerConfig = LRSchedulerConfigType = Any
"""Output of ``configure_optimizers``, or a part of it; see `SchedulerConfig`."""

LRSchedulerTypeUnion = LRSchedulerType = LRScheduler | ReduceLROnPlateau

_METRIC = Tensor | int | float
"""Number or tensor that ``log`` accepts."""

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
