"""Types that scripts import from Lightning's modules ``utilities.types`` for their annotations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ReduceOp

_PATH = str | Path
_DEVICE = torch.device | str | int
_MAP_LOCATION_TYPE = _DEVICE | Callable[[Any, str], Any] | dict[Any, Any] | None
_PARAMETERS = Iterator[nn.Parameter]
_EVALUATE_OUTPUT = list[Mapping[str, float]]
_PREDICT_OUTPUT = list[Any] | list[list[Any]]
CollectibleGroup = torch.distributed.ProcessGroup
"""Process group, such as the return value of ``torch.distributed.new_group``."""


Steppable = Optimizable = torch.optim.Optimizer

__all__ = [
    "_DEVICE",
    "_EVALUATE_OUTPUT",
    "_MAP_LOCATION_TYPE",
    "_PARAMETERS",
    "_PATH",
    "_PREDICT_OUTPUT",
    "CollectibleGroup",
    "Optimizable",
    "ReduceOp",
    "Steppable",
]
