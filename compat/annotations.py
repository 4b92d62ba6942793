"""Types that scripts import from Lightning's modules ``utilities.types`` for their annotations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

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


@runtime_checkable
class Steppable(Protocol):
    """Protocol of objects with the ``step`` method of an optimizer."""

    def step(self, closure: Callable[[], float] | None = ...) -> float | None:
        """Update the parameters once, and return the closure's value, or None without a closure."""


@runtime_checkable
class Optimizable(Steppable, Protocol):
    """Protocol of objects with the main attributes and methods of an optimizer."""

    param_groups: list[dict[Any, Any]]
    defaults: dict[Any, Any]
    state: Any

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the optimizer's state."""


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
