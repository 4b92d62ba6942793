"""Which hooks anyone overrides: found once per run, so that the others cost nothing per step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from ...callbacks import HOOKS, Callback
from ...common.messages import closest_name
from ..core import TaskHooks

if TYPE_CHECKING:
    from ..core import TaskModule
    from ..trainer import Trainer

Hook = Callable[..., Any]
_KINDS = ("validation", "test", "predict")
_TRANSFER = ("on_before_batch_transfer", "on_after_batch_transfer")


class Hooks:
    """For each hook name, the functions to call, in order: ``for hook in hooks.on_train_start: hook()``.

    Callbacks come first, as given; then the task; then the callbacks that act on what the others logged.
    """

    def __init__(self, trainer: Trainer, task: TaskModule, callbacks: Iterable[Callback]) -> None:
        for owner, valid_names in ((task, _OF_TASK), *((callback, _OF_CALLBACK) for callback in callbacks)):
            _refuse_lost_hooks(owner, valid_names)
        chosen = sorted(callbacks, key=lambda callback: callback.after_task)  # stable: equal numbers stay as given
        for name in HOOKS:
            before = [
                self._bind(c, name, trainer, task) for c in chosen if not c.after_task and callback_overrides(c, name)
            ]
            after = [self._bind(c, name, trainer, task) for c in chosen if c.after_task and callback_overrides(c, name)]
            task_hooks = [getattr(task, name)] if task_overrides(task, name) else []
            if name == "on_train_epoch_end":  # what was logged in it, those that monitor want to see
                task_hooks.append(trainer.update_train_epoch_values)
            setattr(self, name, (*before, *task_hooks, *after))

    @staticmethod
    def _bind(callback: Callback, name: str, trainer: Trainer, task: TaskModule) -> Hook:
        return partial(getattr(callback, name), trainer, task)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Hook, ...]: ...


# Hooks of Lightning, now or before its version 2, that have no counterpart here: to define one and see nothing happen
# would be worse than an error. With each, what to write instead.
_EVALUATION_MODE = "evaluation mode is set and taken back part by part; use on_validation_start and its kin"
_LOST = {
    "configure_sharded_model": "use configure_model",
    "on_validation_model_zero_grad": "use on_before_zero_grad",
    **{f"on_{kind}_model_{mode}": _EVALUATION_MODE for kind in _KINDS for mode in ("eval", "train")},
    **{f"{kind}_epoch_end": f"use on_{kind}_epoch_end" for kind in ("validation", "test", "predict")},
    "training_epoch_end": "use on_train_epoch_end",
    **{f"{kind}_step_end": "do it at the end of the step itself" for kind in ("training", *_KINDS)},
    "on_epoch_start": "use on_train_epoch_start",
    "on_epoch_end": "use on_train_epoch_end",
    "on_batch_start": "use on_train_batch_start",
    "on_batch_end": "use on_train_batch_end",
    "on_pretrain_routine_start": "use on_fit_start",
    "on_pretrain_routine_end": "use on_fit_start",
    "on_keyboard_interrupt": "use on_exception",
}
_OF_TASK = {name for name in vars(TaskHooks) if name.startswith("on_")} | set(_TRANSFER)
_OF_CALLBACK = set(HOOKS)


def _refuse_lost_hooks(owner: object, valid_names: set[str]) -> None:
    """Raise a ValueError for a method that looks like a hook and that nobody will call."""
    kind = type(owner)
    for name in dir(kind):
        if name in _LOST:
            raise ValueError(f"{kind.__name__}.{name} is a hook that is never called here: {_LOST[name]}.")
        if name.startswith("on_") and name not in valid_names and (close := closest_name(name, valid_names, 0.9)):
            raise ValueError(f"{kind.__name__}.{name} is no hook. Did you mean {close!r}?")


def callback_overrides(callback: Callback, name: str) -> bool:
    """Return whether a callback has a method ``name`` of its own."""
    return getattr(type(callback), name, None) is not getattr(Callback, name) or name in vars(callback)


def task_overrides(task: TaskModule, name: str) -> bool:
    """Return whether a task has a method ``name`` of its own."""
    return getattr(type(task), name) is not getattr(TaskHooks, name) or name in vars(task)


def name_of(hook: Hook) -> str:
    """What to call a hook in an error: ``"EMA.on_exception"``."""
    function = hook.func if isinstance(hook, partial) else hook
    return getattr(function, "__qualname__", repr(function))
