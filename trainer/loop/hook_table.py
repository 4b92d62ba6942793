"""Dispatch table of the overridden hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from ...callbacks import HOOKS, Callback
from ...common.messages import closest_name, warn
from ..core import TaskHooks, has_own, overrides

if TYPE_CHECKING:
    from ..core import TaskModule
    from ..trainer import Trainer

Hook = Callable[..., Any]
_KINDS = ("validation", "test", "predict")
_TRANSFER = ("on_before_batch_transfer", "on_after_batch_transfer")


class Hooks:
    """Functions to call for each hook name, in order: ``for hook in hooks.on_train_start: hook()``.

    Callbacks without ``after_task`` come first, then the task, then the other callbacks, which use logged values.

    Args:
        trainer: The running Trainer.
        task: The user's task.
        callbacks: Callbacks of the Trainer.

    Attributes:
        task: The user's task.

    Raises:
        ValueError: If the task or a callback defines certain hooks of Lightning that Treadle never calls, or a step
            reads its batches itself.
    """

    def __init__(self, trainer: Trainer, task: TaskModule, callbacks: Iterable[Callback]) -> None:
        self.task = task
        for owner, valid_names in ((task, _OF_TASK), *((callback, _OF_CALLBACK) for callback in callbacks)):
            _check_uncalled_hooks(owner, valid_names)
        for step in ("training_step", *(f"{kind}_step" for kind in _KINDS)):
            if "dataloader_iter" in _get_parameters(getattr(task, step)):
                raise ValueError(
                    f"{type(task).__name__}.{step} has the argument dataloader_iter, but a step gets one batch. Define "
                    f"{step}(batch, batch_idx). To use several batches in one step, set accumulate_grad_batches, or "
                    "let the dataloader combine them."
                )
        chosen = sorted(callbacks, key=lambda callback: callback.after_task)  # stable: equal numbers stay as given
        for name in HOOKS:
            first = [
                self._bind(c, name, trainer, task) for c in chosen if not c.after_task and callback_overrides(c, name)
            ]
            last = [self._bind(c, name, trainer, task) for c in chosen if c.after_task and callback_overrides(c, name)]
            task_hooks = [_pass_stage(getattr(task, name), name)] if overrides(task, name) else []
            if name == "on_load_checkpoint":
                task_hooks = []  # called before the weights are loaded, see `TrainerCheckpointer.load_weights`
            if name == "on_train_epoch_end":  # monitoring callbacks need the values logged in it
                task_hooks.append(trainer.update_train_epoch_values)
            setattr(self, name, (*first, *task_hooks, *last))

    def _bind(self, callback: Callback, name: str, trainer: Trainer, task: TaskModule) -> Hook:
        hook = callback._guard(name, _pass_stage(getattr(callback, name), name))
        return partial(hook, trainer, task)

    def of_batches(self, stage: str, moment: str, loaders: int) -> list[Hook]:
        """Return the hooks before or after a batch of an evaluation, each in a form that accepts ``dataloader_idx``.

        Users may omit this argument with a single dataloader, and ``*args`` then gets no index, as in Lightning.

        Args:
            stage: ``"validation"``, ``"test"`` or ``"predict"``.
            moment: ``"start"`` or ``"end"``.
            loaders: Number of dataloaders.

        Raises:
            ValueError: If there are several dataloaders and a hook does not accept ``dataloader_idx``.
        """
        hooks: list[Hook] = []
        full = 3 if moment == "start" else 4
        for hook in getattr(self, f"on_{stage}_batch_{moment}"):
            is_short = count_arguments(hook, full, several=loaders > 1) == full - 1
            if is_short and loaders > 1:
                raise ValueError(
                    f"{name_of(hook)} has no argument dataloader_idx, but there are {loaders} dataloaders. Add "
                    "dataloader_idx=0 as the last argument."
                )
            hooks.append(_omit_last(hook) if is_short else hook)
        return hooks

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Hook, ...]: ...


# Hooks that Lightning calls or rejects, and that have no counterpart here: a run without them would differ.
# With their replacements.
_LOST = {
    "configure_sharded_model": "use configure_model",
    **{f"{kind}_epoch_end": f"use on_{kind}_epoch_end" for kind in ("validation", "test")},
    "training_epoch_end": "use on_train_epoch_end",
}
# Hooks from Lightning versions before 2, which are never called. Public code still defines them.
_FORMER = {
    "predict_epoch_end": "use on_predict_epoch_end",
    **{f"{kind}_step_end": f"move its code to the end of {kind}_step" for kind in ("training", *_KINDS)},
    "on_epoch_start": "use on_train_epoch_start",
    "on_epoch_end": "use on_train_epoch_end",
    "on_batch_start": "use on_train_batch_start",
    "on_batch_end": "use on_train_batch_end",
    "on_pretrain_routine_start": "use on_fit_start",
    "on_pretrain_routine_end": "use on_fit_start",
    "on_keyboard_interrupt": "use on_exception",
}
# Words of other libraries for the words in the names of hooks.
_SYNONYMS = {
    **{"begin": "start", "begins": "start", "started": "start", "finish": "end", "finished": "end", "stop": "end"},
    **{"done": "end", "training": "train", "val": "validation", "valid": "validation", "validate": "validation"},
    **{"eval": "validation", "evaluation": "validation", "testing": "test", "prediction": "predict"},
}
_OF_TASK = {name for name in vars(TaskHooks) if name.startswith("on_")} | set(_TRANSFER)
_OF_CALLBACK = set(HOOKS)


def _check_uncalled_hooks(owner: object, valid_names: set[str]) -> None:
    """Warn about methods that look like hooks and are never called; raise a ValueError for those in `_LOST`."""
    kind = type(owner)
    for name in dir(kind):
        if name in _LOST and callable(getattr(kind, name)):
            raise ValueError(f"{kind.__name__}.{name} is a hook that Treadle never calls. Instead, {_LOST[name]}.")
        if name in _FORMER and callable(getattr(kind, name)):
            warn(f"{kind.__name__}.{name} is a hook from Lightning 1 and is never called. Instead, {_FORMER[name]}.")
        elif name.startswith("on_") and name not in valid_names and (close := _find_hook(name, valid_names)):
            warn(f"{kind.__name__}.{name} is not a hook and is never called. Did you mean {close!r}?")


def _find_hook(name: str, valid_names: set[str]) -> str | None:
    """Return the hook that a method was probably meant to be, such as on_train_epoch_end for ``on_epoch_finish``."""
    candidate = "_".join(_SYNONYMS.get(word, word) for word in name.split("_"))
    for close in (candidate, candidate.replace("on_", "on_train_", 1)):
        if close in valid_names:
            return close
    return closest_name(name, valid_names, 0.9)


def callback_overrides(callback: Callback, name: str) -> bool:
    """Return whether a callback overrides the method ``name``."""
    return has_own(callback, name, Callback)


def count_positional(function: Callable[..., Any]) -> int:
    """Return the number of positional arguments that a bound method accepts; 99 for any number, or if unknown."""
    return count_arguments(function, 99, several=True)


def count_arguments(function: Callable[..., Any], full: int, *, several: bool) -> int:
    """Return how many of ``full`` positional arguments to pass to a bound method; the last is ``dataloader_idx``.

    Args:
        function: Step or hook.
        full: Number of arguments with several dataloaders.
        several: Whether there are several dataloaders. With a single one, ``*args`` gets no ``dataloader_idx``.
    """
    parameters = _get_parameters(function).values()
    named = min(full, sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters))
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return full if several else max(named, full - 1)
    return named


def _omit_last(hook: Hook) -> Hook:
    """Return ``hook`` in a form that omits its last argument."""

    @wraps(hook)
    def call(*arguments: Any) -> Any:
        return hook(*arguments[:-1])

    return call


def _pass_stage(hook: Hook, name: str) -> Hook:
    return pass_by_keyword(hook, "stage") if name in ("setup", "teardown") else hook


def _get_parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # for example a builtin
        return {"args": inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)}


def pass_by_keyword(hook: Hook, *names: str) -> Hook:
    """Return ``hook`` in a form that passes its last arguments by keyword, if its signature accepts these names.

    Lightning passes them by keyword, so a hook may take them in ``**kwargs``. A hook that uses other names gets them
    by position.
    """
    try:
        inspect.signature(hook).bind_partial(**dict.fromkeys(names))
    except (TypeError, ValueError):  # it uses other names, or is a builtin
        return hook

    @wraps(hook)
    def call(*arguments: Any) -> Any:
        first = len(arguments) - len(names)
        return hook(*arguments[:first], **dict(zip(names, arguments[first:], strict=True)))

    return call


def name_of(hook: Hook) -> str:
    """Return the name of a hook for messages, such as ``"EMA.on_exception"``."""
    function = hook.func if isinstance(hook, partial) else hook
    return getattr(function, "__qualname__", repr(function))
