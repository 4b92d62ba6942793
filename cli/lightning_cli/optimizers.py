"""Types for optimizers and schedulers in annotations, and a function that instantiates a configured class."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler


class ReduceLROnPlateau(schedulers.ReduceLROnPlateau):
    """PyTorch's `ReduceLROnPlateau` with the name of the metric that it monitors.

    Args:
        optimizer: The optimizer whose learning rates are reduced.
        monitor: Name of the logged metric to monitor.
        mode: ``"min"`` if a lower value is better, ``"max"`` if a higher value is better. Default: ``"min"``.
        factor: Factor by which learning rates are multiplied. Default: 0.1.
        patience: Number of epochs without improvement to tolerate before learning rates are reduced. Default: 10.
        threshold: Minimum change that counts as an improvement. Default: 1e-4.
        threshold_mode: Whether ``threshold`` is relative (``"rel"``) or absolute (``"abs"``). Default: ``"rel"``.
        cooldown: Number of epochs after a reduction that do not count toward ``patience``. Default: 0.
        min_lr: Lower bound of the learning rates, or a list with one bound per parameter group. Default: 0.
        eps: Minimum change of a learning rate. Smaller changes are not applied. Default: 1e-8.

    Examples:
        >>> import torch
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
        >>> ReduceLROnPlateau(optimizer, monitor="val_loss", patience=2).monitor
        'val_loss'
    """

    def __init__(
        self,
        optimizer: Optimizer,
        monitor: str,
        mode: Literal["min", "max"] = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: Literal["rel", "abs"] = "rel",
        cooldown: int = 0,
        min_lr: float | list[float] = 0.0,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(optimizer, mode, factor, patience, threshold, threshold_mode, cooldown, min_lr, eps)
        self.monitor = monitor


LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
LRSchedulerType = type[LRScheduler] | type[ReduceLROnPlateau]
OptimizerCallable = Callable[[Iterable], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau]


def instantiate_class(args: Any, init: Mapping[str, Any]) -> Any:
    """Build an object from its settings and from positional arguments that the settings do not contain.

    Args:
        args: A tuple of positional arguments, or a single argument.
        init: A dict of the form ``{"class_path": ..., "init_args": {...}}``. ``init_args`` is optional.

    Returns:
        An instance of the class that ``class_path`` names. If it names a function, the function's return value.

    Examples:
        >>> import torch
        >>> init = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
        >>> instantiate_class(torch.nn.Linear(2, 1).parameters(), init).defaults["lr"]
        0.1
    """
    module, _, name = init["class_path"].rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    return cls(*(args if isinstance(args, tuple) else (args,)), **init.get("init_args", {}))
