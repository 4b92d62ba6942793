"""Oversights that a run would not fail from: warnings at the start of ``fit``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from ...common.messages import nearest, warn
from ...engine import strip_compile_prefix
from ..core import TaskModule

if TYPE_CHECKING:
    from ...callbacks import EarlyStopping, ModelCheckpoint
    from ..trainer import Trainer

_SHOWN = 3
_DEEPEST = 3  # lists in lists
_LONGEST = 1024  # a longer list among a module's attributes holds data
_REGISTERED = ("_parameters", "_buffers", "_modules")
_OF_VALIDATION = {"val", "valid", "validation", "eval"}


def warn_of_untrained(trainer: Trainer, task: TaskModule) -> None:
    """Warn of parameters that require gradients and are in no optimizer, and of modules that are not registered."""
    optimized_ids = {
        id(p) for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]
    }
    names = [
        strip_compile_prefix(name)
        for name, p in task.named_parameters()
        if p.requires_grad and id(p) not in optimized_ids
    ]
    if names and optimized_ids:  # without an optimizer, that is meant
        warn(
            f"in no optimizer, though they require gradients: {_join_first(names)}. They are not trained. Add them in "
            "configure_optimizers, or freeze them with requires_grad_(False)."
        )
    if hidden := list(hidden_modules(task)):
        warn(
            f"not registered in {type(task).__name__}, as they are in plain lists or dicts: {_join_first(hidden)}. "
            "Their parameters are in no checkpoint, are not moved to the device, and self.parameters() leaves them "
            "out. Use nn.ModuleList, nn.ModuleDict or nn.ParameterList; freeze what is hidden on purpose."
        )


def hidden_modules(task: nn.Module) -> Iterator[str]:
    """Yield the places of modules and parameters that require gradients, in lists and dicts that torch ignores."""
    registered = {id(parameter) for parameter in task.parameters()}
    for path, module in task.named_modules():
        for name, value in vars(module).items():
            if name not in _REGISTERED and isinstance(value, list | tuple | dict):
                yield from _iterate_hidden(f"{path}.{name}" if path else name, value, registered, _DEEPEST)


def _iterate_hidden(place: str, value: Any, registered: set[int], depth: int) -> Iterator[str]:
    if isinstance(value, nn.Module | nn.Parameter):
        parameters: Iterable[nn.Parameter] = value.parameters() if isinstance(value, nn.Module) else [value]
        if any(p.requires_grad and id(p) not in registered for p in parameters):
            yield place
    elif depth and isinstance(value, list | tuple | dict) and len(value) <= _LONGEST:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _iterate_hidden(f"{place}[{key!r}]", item, registered, depth - 1)


def check_monitors(trainer: Trainer, logged: Iterable[str] | None) -> None:
    """Look for monitors that will never be logged.

    What training logs, or validation in a later epoch, nobody knows yet. So a monitor that looks like one of
    validation's, and that the sanity check did not log, is a warning only.

    Args:
        trainer: Whose callbacks and schedulers are looked at.
        logged: What the sanity check logged; None without one.

    Raises:
        ValueError: Where nothing is ever logged, and the monitor has to be.
    """
    monitors = list(_iterate_monitors(trainer))
    if trainer.barebones:
        for owner, name, strict in monitors:
            if strict:
                raise ValueError(
                    f"{owner} {name!r} is never logged: barebones=True turns self.log off. Leave out one of the two."
                )
    if logged is None:
        return
    names = sorted(logged)
    for owner, name, _ in monitors:
        if name not in names and _OF_VALIDATION & set(re.split(r"[^a-z]+", name.lower())):
            warn(
                f"{owner} {name!r} was not logged by the validation of the sanity check, which logged "
                f"{', '.join(names) or 'nothing'}.{nearest(name, names)} If nothing else logs it, the run will fail at "
                "the first check."
            )


def _iterate_monitors(trainer: Trainer) -> Iterator[tuple[str, str, bool]]:
    watching: list[EarlyStopping | ModelCheckpoint] = [*trainer.early_stopping_callbacks, *trainer.checkpoint_callbacks]
    for callback in watching:
        if callback.monitor is not None:
            yield f"{type(callback).__name__}'s monitor", callback.monitor, getattr(callback, "strict", True)
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor is not None:
            yield f"{type(config.scheduler).__name__}'s monitor", config.monitor, config.strict


def _join_first(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
