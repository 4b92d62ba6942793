"""Optimizers and schedulers in settings: the types that name them, and how they are built."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler

from ..config import ConfigError
from ..config.instantiate import catalog
from .settings import translate_class_path


class ReduceLROnPlateau(schedulers.ReduceLROnPlateau):
    """PyTorch's `ReduceLROnPlateau` that carries the name of the metric which it watches.

    Args:
        optimizer: the optimizer.
        monitor: the metric.
        mode, factor, patience, threshold, threshold_mode, cooldown, min_lr, eps: as in PyTorch.
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


def instantiate_class(args: Any, init: Mapping[str, Any] | argparse.Namespace) -> Any:
    """Build an object of a class with positional arguments that the settings do not have.

    Args:
        args: the positional arguments, or a single one.
        init: ``{"class_path": ..., "init_args": {...}}``.

    Raises:
        ConfigError: if the class path leads nowhere.
    """
    settings = vars(init) if isinstance(init, argparse.Namespace) else init
    if "class_path" not in settings:
        raise ConfigError(f"instantiate_class needs {{'class_path': ..., 'init_args': ...}}, not {init!r:.200}.")
    keywords = settings.get("init_args") or {}
    keywords = vars(keywords) if isinstance(keywords, argparse.Namespace) else keywords
    cls = catalog.find(translate_class_path(settings["class_path"]), object)
    return cls(*(args if isinstance(args, tuple) else (args,)), **keywords)
