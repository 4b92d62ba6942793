"""Every form that ``configure_optimizers`` may return, made into one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...common.messages import closest_name, nearest, warn
from ...common.validation import check_int, choose

_FORMS = (
    "an optimizer; a list of optimizers; two lists (optimizers, schedulers); a dict with 'optimizer' and, if you like, "
    "'lr_scheduler'; a list of such dicts; or None"
)

_TYPING_ERROR = 0.9  # 'lr_schedular' is 0.92; 'scheduler' for 'lr_scheduler', a key of public code, is 0.86


@dataclass(kw_only=True)
class SchedulerConfig:
    """A scheduler and when it steps.

    Attributes:
        scheduler: Anything with ``step`` and ``state_dict``.
        interval: ``"epoch"`` or ``"step"`` (optimizer steps).
        frequency: Step every so many intervals.
        monitor: The logged value a plateau scheduler is stepped with.
        strict: Whether a monitored value that was not logged is an error.
        name: For `LearningRateMonitor`.
        reduce_on_plateau: Whether it takes the monitored value.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False

    def __post_init__(self) -> None:
        if not (hasattr(self.scheduler, "step") and hasattr(self.scheduler, "state_dict")):
            raise TypeError(f"a scheduler needs step() and state_dict(); got {self.scheduler!r}.")
        choose("interval", self.interval, ("epoch", "step"))
        check_int("frequency", self.frequency, 1)
        self.reduce_on_plateau = self.reduce_on_plateau or isinstance(self.scheduler, ReduceLROnPlateau)

    def check_monitor(self) -> None:
        """Raise a ValueError for a plateau scheduler that the loop is to step, and that watches nothing."""
        if self.reduce_on_plateau and self.monitor is None:
            raise ValueError(
                "a ReduceLROnPlateau scheduler needs to know what to watch: return "
                "{'optimizer': ..., 'lr_scheduler': {'scheduler': ..., 'monitor': 'val_loss'}}."
            )


def parse_optimizers(returned: Any) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Return the optimizers and schedulers in whatever ``configure_optimizers`` returned.

    Raises:
        TypeError, ValueError: Names what was returned and what may be.
    """
    if returned is None:
        return [], []
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping):
        return _parse_dict(returned)
    if not isinstance(returned, Sequence):
        raise TypeError(f"configure_optimizers returned a {type(returned).__name__}; it may return {_FORMS}.")
    parts = list(returned)
    if not parts:
        raise ValueError(f"configure_optimizers returned an empty {type(returned).__name__}; it may return {_FORMS}.")
    if len(parts) == 2 and isinstance(parts[0], list | tuple):
        if not parts[0]:
            raise ValueError("configure_optimizers returned two lists, and the first, of optimizers, is empty.")
        # A single scheduler, or its dict, may stand for a list of one, as in Lightning.
        schedulers = parts[1] if isinstance(parts[1], list | tuple) else [parts[1]]
        return [_check_optimizer(o) for o in parts[0]], [_parse_scheduler(s, None) for s in schedulers]
    if parts and all(isinstance(part, Mapping) for part in parts):
        pairs = [_parse_dict(part) for part in parts]
        return [o for os, _ in pairs for o in os], [s for _, ss in pairs for s in ss]
    return [_check_optimizer(part) for part in parts], []


def check_ownership(module: nn.Module, optimizers: list[Optimizer], schedulers: list[SchedulerConfig]) -> None:
    """The optimizers must train the module, and the schedulers must drive these optimizers.

    Raises:
        ValueError: If one has nothing to do with the run, so that it would do nothing without a word.
    """
    parameter_ids = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        if not any(id(parameter) in parameter_ids for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(
                f"configure_optimizers returned a {type(optimizer).__name__} that holds none of "
                f"{type(module).__name__}'s parameters, so nothing would be trained. Build it from self.parameters()."
            )
    for config in schedulers:
        driven = getattr(config.scheduler, "optimizer", None)
        if isinstance(driven, Optimizer) and not any(driven is optimizer for optimizer in optimizers):
            raise ValueError(
                f"configure_optimizers returned a {type(config.scheduler).__name__} that drives another optimizer than "
                "the one it returned. Build it from that one."
            )


def _check_optimizer(value: Any) -> Optimizer:
    if isinstance(value, Optimizer):
        return value
    raise TypeError(
        f"configure_optimizers returned {type(value).__name__} where an optimizer stands; it may return {_FORMS}."
    )


def _parse_dict(config: Mapping[str, Any]) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    _check_keys("configure_optimizers returned a dict", config, ("optimizer", "lr_scheduler", "monitor"))
    if "optimizer" not in config:
        raise ValueError("configure_optimizers returned a dict without 'optimizer'.")
    scheduler = config.get("lr_scheduler")
    schedulers = [] if scheduler is None else [_parse_scheduler(scheduler, config.get("monitor"))]
    return [_check_optimizer(config["optimizer"])], schedulers


def _parse_scheduler(value: Any, monitor: str | None) -> SchedulerConfig:
    if not isinstance(value, Mapping):
        return SchedulerConfig(scheduler=value, monitor=monitor)
    valid = [field.name for field in fields(SchedulerConfig)]
    _check_keys("configure_optimizers returned an lr_scheduler dict", value, valid)
    if "scheduler" not in value:
        raise ValueError("the lr_scheduler dict has no 'scheduler'.")
    return SchedulerConfig(**{"monitor": monitor, **{key: value[key] for key in valid if key in value}})


def _check_keys(source: str, config: Mapping[str, Any], valid: Sequence[str]) -> None:
    """Warn of keys that nobody reads, as public code has some.

    Raises:
        ValueError: For a key that is nearly a valid one: a scheduler would be lost by a typing error.
    """
    for key in config:
        if key in valid:
            continue
        if (close := closest_name(key, valid, _TYPING_ERROR)) is not None:
            raise ValueError(f"{source} with the key {key!r}; it may have {', '.join(valid)}. Did you mean {close!r}?")
        keys = f"the keys are {', '.join(valid)}.{nearest(key, valid)}"
        warn(f"{source} with the key {key!r}, which nobody reads; {keys}")


def endless(scheduler: Any) -> str | None:
    """Return the name of a scheduler's length that is infinite; None if it has none such.

    Looks at torch's schedulers, those that one combines, and at what a ``LambdaLR``'s function was made with: that of
    transformers' ``get_cosine_schedule_with_warmup`` holds ``num_training_steps``.
    """
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
