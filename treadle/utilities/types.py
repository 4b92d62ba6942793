"""Types that scripts import from ``lightning.pytorch.utilities.types`` for their annotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, Required, TypeAlias, TypedDict

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..trainer.core import SchedulerConfig as LRSchedulerConfig

STEP_OUTPUT = Tensor | Mapping[str, Any] | None
"""Return value of ``training_step`` and the other steps: the loss, a dict, or None."""

TRAIN_DATALOADERS = EVAL_DATALOADERS = Any
"""Dataloader or collection of dataloaders."""

LRSchedulerTypeUnion: TypeAlias = LRScheduler | ReduceLROnPlateau
LRSchedulerType = LRSchedulerTypeUnion


class LRSchedulerConfigType(TypedDict, total=False):
    """Schedule in the output of ``configure_optimizers``; see `SchedulerConfig`."""

    scheduler: Required[LRSchedulerTypeUnion]
    name: str | None
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class OptimizerConfig(TypedDict):
    """Output of ``configure_optimizers`` without a schedule."""

    optimizer: Optimizer


class OptimizerLRSchedulerConfig(TypedDict):
    """Output of ``configure_optimizers`` with a schedule."""

    optimizer: Optimizer
    lr_scheduler: LRSchedulerTypeUnion | LRSchedulerConfigType
    monitor: NotRequired[str]


OptimizerLRScheduler = Any
"""Output of ``configure_optimizers``."""

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
