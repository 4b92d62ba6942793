"""Connection of a `TaskModule` to the `Fabric` that has set it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

from torch import Tensor

from ...common.messages import name_type
from ...engine import Accelerator
from ...engine.optim import PreparedOptimizer


class TaskTrainer:
    """The ``trainer`` of a `TaskModule` in a Fabric's loop. It has the Fabric's attributes.

    Args:
        fabric: The Fabric.
        optimizers: The task's prepared optimizers.
    """

    current_epoch = global_step = 0
    lr_scheduler_configs: Sequence[Any] = ()

    def __init__(self, fabric: Any, optimizers: Sequence[PreparedOptimizer]) -> None:
        self.fabric = fabric
        self.optimizers = list(optimizers)

    @property
    def accelerator(self) -> Any:
        """The Fabric's Accelerator, with the task's optimizers."""
        return _WithOptimizers(self.fabric.accelerator, self.optimizers)

    @property
    def steps(self) -> Any:
        """The Fabric, whose `backward` the task's ``manual_backward`` calls."""
        return self.fabric

    def log_dict(self, values: Mapping[str, Any], logger: bool | None) -> None:
        """Send the values that a task logs to the Fabric's loggers, unless ``logger`` is False.

        Raises:
            ValueError: If a value is neither a number nor a tensor.
        """
        if logger is False:
            return
        for name, value in values.items():
            if not isinstance(value, Number | Tensor):
                raise ValueError(
                    f"self.log({name!r}) got {name_type(value)}, but a task in a Fabric's loop can log only numbers "
                    "and tensors. Pass the number, for example metric.compute()."
                )
        self.fabric.log_dict(values)

    def __getattr__(self, name: str) -> Any:
        if name == "fabric":
            raise AttributeError(name)  # it is being copied
        try:
            return getattr(self.fabric, name)
        except AttributeError as error:
            raise AttributeError(
                f"self.trainer has no attribute {name!r} in a Fabric's loop, because there is no Trainer. Pass the "
                "value to the task's method."
            ) from error


class _WithOptimizers:
    def __init__(self, accelerator: Accelerator, optimizers: list[PreparedOptimizer]) -> None:
        self._accelerator = accelerator
        self.optimizers = optimizers

    def __getattr__(self, name: str) -> Any:
        if name == "_accelerator":
            raise AttributeError(name)  # it is being copied
        return getattr(self._accelerator, name)
