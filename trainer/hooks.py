"""Which hooks anyone overrides: found once per run, so that the others cost nothing per step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..callbacks.callback import HOOKS, Callback
from .task_hooks import TaskHooks

if TYPE_CHECKING:
    from .task import TaskModule
    from .trainer import Trainer

Hook = Callable[..., Any]


class Hooks:
    """For each hook name, the functions to call, in order: ``for hook in hooks.on_train_start: hook()``.

    Callbacks come first, as given; then the task; then the callbacks that act on what the others logged.
    """

    def __init__(self, trainer: Trainer, task: TaskModule, callbacks: Iterable[Callback]) -> None:
        chosen = sorted(callbacks, key=lambda callback: callback.after_task)  # stable: equal numbers stay as given
        for name in HOOKS:
            before = [self._bind(c, name, trainer, task) for c in chosen if not c.after_task and _overrides(c, name)]
            after = [self._bind(c, name, trainer, task) for c in chosen if c.after_task and _overrides(c, name)]
            own = [getattr(task, name)] if _task_overrides(task, name) else []
            if name == "on_train_epoch_end":  # what was logged in it, those that monitor want to see
                own.append(trainer.update_train_epoch_values)
            setattr(self, name, (*before, *own, *after))

    @staticmethod
    def _bind(callback: Callback, name: str, trainer: Trainer, task: TaskModule) -> Hook:
        return partial(getattr(callback, name), trainer, task)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Hook, ...]: ...


def _overrides(callback: Callback, name: str) -> bool:
    return getattr(type(callback), name, None) is not getattr(Callback, name) or name in vars(callback)


def _task_overrides(task: TaskModule, name: str) -> bool:
    return getattr(type(task), name) is not getattr(TaskHooks, name)
