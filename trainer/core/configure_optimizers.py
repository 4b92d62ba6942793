"""Parsing and checks of the result of ``configure_optimizers``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...common.messages import closest_name, name_type, nearest, warn
from ...common.validation import WrongTypeError, check_int, choose

_FORMS = (
    "an optimizer; a list of optimizers; two lists (optimizers, schedulers); a dict with 'optimizer' and optionally "
    "'lr_scheduler'; a list of such dicts; or None"
)

_TYPING_ERROR = 0.9  # 'lr_schedular' is 0.92; 'scheduler' for 'lr_scheduler', a key of public code, is 0.86


@dataclass(kw_only=True)
class SchedulerConfig:
    """Learning rate scheduler and the settings that determine when it steps.

    Attributes:
        scheduler: Learning rate scheduler: an object with ``step`` and ``state_dict``.
        interval: Unit of ``frequency``: ``"epoch"`` or ``"step"`` (optimizer steps). Default: ``"epoch"``.
        frequency: Number of epochs or optimizer steps between the scheduler's steps. Default: 1.
        monitor: Name of the logged value that is passed to a plateau scheduler's ``step``. Default: None.
        strict: Whether to raise an error if the monitored value was never logged. Default: True.
        name: Name under which `LearningRateMonitor` logs the learning rate. Default: None.
        reduce_on_plateau: Whether ``step`` receives the monitored value. Default: False; True for
            ``ReduceLROnPlateau``.

    Raises:
        TypeError, ValueError: If ``scheduler``, ``interval`` or ``frequency`` is invalid.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False

    def __post_init__(self) -> None:
        self._check_method("state_dict")
        choose("interval", self.interval, ("epoch", "step"))
        check_int("frequency", self.frequency, 1)
        self.reduce_on_plateau = self.reduce_on_plateau or isinstance(self.scheduler, ReduceLROnPlateau)

    def _check_method(self, name: str) -> None:
        if not hasattr(self.scheduler, name):
            raise WrongTypeError(
                f"scheduler={self.scheduler!r:.100} must be a scheduler, an object with step() and state_dict(), but "
                f"has no {name}(). Use one from torch.optim.lr_scheduler."
            )

    def check_steps(self) -> None:
        """Raise a ValueError if a plateau scheduler lacks a ``monitor``."""
        self._check_method("step")
        if self.reduce_on_plateau and self.monitor is None:
            raise ValueError(
                f"the scheduler {type(self.scheduler).__name__} needs a monitor. Return "
                "{'optimizer': ..., 'lr_scheduler': {'scheduler': ..., 'monitor': 'val_loss'}}."
            )


def parse_optimizers(returned: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return the optimizers and schedulers in the result of ``configure_optimizers``.

    Raises:
        TypeError, ValueError: If the result is invalid.
    """
    if returned is None:
        return [], []
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        return _parse_dict(returned)
    if not isinstance(returned, Sequence):
        raise WrongTypeError(f"configure_optimizers returned {name_type(returned)}. It must return {_FORMS}.")
    parts = list(returned)
    if not parts:
        raise ValueError(f"configure_optimizers returned an empty {type(returned).__name__}. It must return {_FORMS}.")
    if len(parts) == 2 and isinstance(parts[0], list | tuple):
        if not parts[0]:
            raise ValueError(
                "configure_optimizers returned two items, but the first, which must contain the optimizers, is empty. "
                "Return at least one optimizer, or None to train without an optimizer."
            )
        # A single scheduler, or its dict, counts as a list of one, as in Lightning.
        schedulers = parts[1] if isinstance(parts[1], list | tuple) else [parts[1]]
        return [_check_optimizer(o) for o in parts[0]], [_parse_scheduler(s, None) for s in schedulers]
    if parts and all(isinstance(part, Mapping) for part in parts):
        pairs = [_parse_dict(part) for part in parts]
        return [o for os, _ in pairs for o in os], [s for _, ss in pairs for s in ss]
    return [_check_optimizer(part) for part in parts], []


def check_ownership(module: nn.Module, optimizers: list[Optimizer], schedulers: list[SchedulerConfig]) -> None:
    """Raise a ValueError unless each optimizer has parameters of the module and the schedulers use these optimizers."""
    parameter_ids = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        if not any(id(parameter) in parameter_ids for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                f"configure_optimizers returned {name_type(optimizer)} that holds none of "
                f"{type(module).__name__}'s parameters, so it would train nothing. Build it from self.parameters()."
            )
    for config in schedulers:
        driven = getattr(config.scheduler, "optimizer", None)
        if isinstance(driven, Optimizer) and not any(driven is optimizer for optimizer in optimizers):
            raise ValueError(
                f"configure_optimizers returned {name_type(config.scheduler)}, but not the optimizer of this "
                "scheduler. Build the scheduler from the returned optimizer."
            )


def check_disjoint(module: nn.Module, optimizers: list[Optimizer]) -> None:
    """Raise a ValueError if a parameter is in two of the optimizers, which would both update it in each step."""
    owners: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            first = owners.setdefault(id(parameter), optimizer)
            if first is not optimizer or optimizers.count(optimizer) > 1:
                name = next((name for name, p in module.named_parameters() if p is parameter), "")
                raise ValueError(
                    f"the parameter {name or f'of shape {tuple(parameter.shape)}'} is in two optimizers that "
                    f"configure_optimizers returned ({type(first).__name__} and {type(optimizer).__name__}), so each "
                    "step would update it twice. Pass each parameter to one optimizer. If the optimizers take turns, "
                    "set self.automatic_optimization = False in __init__, and step them in training_step."
                )


def _check_optimizer(value: Any) -> Optimizer:
    if isinstance(value, Optimizer):
        return value
    raise WrongTypeError(
        f"configure_optimizers returned {name_type(value)} where an optimizer is expected. It must return {_FORMS}."
    )


def _parse_dict(config: Mapping[str, Any]) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    _check_keys("configure_optimizers returned a dict", config, ("optimizer", "lr_scheduler", "monitor"))
    if "optimizer" not in config:
        raise ValueError("configure_optimizers returned a dict without 'optimizer'. Add this key.")
    scheduler = config.get("lr_scheduler")
    schedulers = [] if scheduler is None else [_parse_scheduler(scheduler, config.get("monitor"))]
    return [_check_optimizer(config["optimizer"])], schedulers


def _parse_scheduler(value: Any, monitor: str | None) -> SchedulerConfig:
    if not isinstance(value, Mapping):
        return SchedulerConfig(scheduler=value, monitor=monitor)
    valid = [field.name for field in fields(SchedulerConfig)]
    _check_keys("configure_optimizers returned an lr_scheduler dict", value, valid)
    if "scheduler" not in value:
        raise ValueError("configure_optimizers returned an lr_scheduler dict without 'scheduler'. Add this key.")
    return SchedulerConfig(**{"monitor": monitor, **{key: value[key] for key in valid if key in value}})


def _check_keys(source: str, config: Mapping[str, Any], valid: Sequence[str]) -> None:
    """Warn about unknown keys; raise a ValueError if one is probably a misspelling of a valid key."""
    for key in config:
        if key in valid:
            continue
        if (close := closest_name(key, valid, _TYPING_ERROR)) is not None:
            raise ValueError(
                f"{source} with the key {key!r}. The valid keys are {', '.join(valid)}. Did you mean {close!r}?"
            )
        keys = f"The valid keys are {', '.join(valid)}.{nearest(key, valid)}"
        warn(f"{source} with the key {key!r}, which is ignored. {keys}")


def endless(scheduler: Any) -> str | None:
    """Return the name of an infinite value in a scheduler or its lambdas, such as ``total_steps``; else None."""
    for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
        values = {name: getattr(part, name, None) for name in ("total_steps", "T_max", "total_iters", "T_0")}
        for function in getattr(part, "lr_lambdas", ()):
            if inspect.isfunction(function):
                values |= inspect.getclosurevars(function).nonlocals
            values |= getattr(function, "keywords", {})
        for name, value in values.items():
            if isinstance(value, float) and value == inf:
                return name
    return None
