"""Interception of points in a run, for tests."""

from __future__ import annotations

import functools
import gc
import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..callbacks import HOOKS
from ..engine import Accelerator
from ..engine.checkpoint import filesystem
from ..engine.optim import Accumulation
from ..trainer.loop import Hooks

_WRITES = ("write_bytes", "write_tensors", "write_stream")

OPERATIONS = ("mkdir", *_WRITES, "fsync", "rename", "replace", "unlink", "rmdir")
"""Functions of `treadle.engine.checkpoint.filesystem` that change files."""

POINTS: tuple[str, ...] = (
    *(f"{part}:{moment}" for part in ("forward", "backward", "step") for moment in ("before", "after")),
    *(f"callback:{hook}:{moment}" for hook in HOOKS for moment in ("before", "after")),
    *(f"disk:{name}:{m}" for name in OPERATIONS for m in ("before", "half", "after") if m != "half" or name in _WRITES),
)
"""All points at which a fault can happen."""

Due = TypeVar("Due")


class Places(Generic[Due]):
    """Interceptor of points in a run. While armed, it performs the firings that are due at each point.

    Args:
        due: Function that is called as ``due(point, *paths)`` and returns the list of due firings.
        happen: Function that performs these firings.
        active_points: Points to intercept.

    Attributes:
        step: Optimizer step in progress, which lasts until the next one begins; 0 before the first step.
    """

    def __init__(
        self, due: Callable[..., list[Due]], happen: Callable[[list[Due]], None], active_points: Iterable[str]
    ) -> None:
        self.due = due
        self.happen = happen
        self.active_points = frozenset(active_points)
        self.step = 0
        self._undo: ExitStack | None = None
        self._inside: Any = None  # the outermost forward that is running
        self._accumulations: weakref.WeakSet[Accumulation] = weakref.WeakSet()
        self._progress: weakref.WeakKeyDictionary[Accumulation, Any] = weakref.WeakKeyDictionary()

    def __enter__(self) -> Places[Due]:
        if self._undo is not None:
            raise RuntimeError("this plan is already armed. Leave its with block before entering it again.")
        with ExitStack() as undo:
            self._arm(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        undo, self._undo = self._undo, None
        assert undo is not None
        undo.close()

    def _arm(self, undo: ExitStack) -> None:
        kinds = {point.split(":")[0] for point in self.active_points}
        _replace(undo, Accumulation, "backward", self._wrap_backward)  # these two also determine the step
        _replace(undo, Hooks, "__init__", self._wrap_hooks)
        if "disk" in kinds:
            for name in OPERATIONS:
                _replace(undo, filesystem, name, functools.partial(self._wrap_operation, name))
        if "step" in kinds:
            undo.callback(
                register_optimizer_step_pre_hook(functools.partial(self._reach_at_step, "step:before")).remove
            )
            undo.callback(
                register_optimizer_step_post_hook(functools.partial(self._reach_at_step, "step:after")).remove
            )
        if "forward" in kinds:
            # A prepared model may be the user's own object, so only the Accelerator that prepared it can identify it.
            self._accumulations.update(o for o in gc.get_objects() if issubclass(type(o), Accumulation))
            _replace(undo, Accelerator, "prepare_model", self._wrap_prepare_model)
            _replace(undo, Accelerator, "method", self._wrap_method)
            before, after = map(torch.compiler.disable, (self._enter_forward, self._leave_forward))
            undo.callback(register_module_forward_pre_hook(before).remove)
            undo.callback(register_module_forward_hook(after, always_call=True).remove)

    def _reach(self, point: str, *paths: str) -> None:
        # Objects created while armed (a Trainer's hooks, a scheduler's wrapper of a step) may outlive it.
        if self._undo is not None and point in self.active_points and (due := self.due(point, *paths)):
            self.happen(due)

    def _work(self, accumulation: Accumulation) -> None:
        self._accumulations.add(accumulation)
        progress = self._progress.get(accumulation)
        self.step = 1 + (accumulation.steps if progress is None else progress.step)

    # -- replacements of Treadle's functions ---------------------------------------------------------------------

    def _wrap_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        def backward(accumulation: Accumulation, *args: Any, **kwargs: Any) -> None:
            self._work(accumulation)
            self._reach("backward:before")
            original(accumulation, *args, **kwargs)
            self._reach("backward:after")

        return backward

    def _wrap_hooks(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(hooks: Hooks, trainer: Any, *args: Any) -> None:
            original(hooks, trainer, *args)
            assert self._undo is not None
            accumulation = trainer.accelerator.accumulation
            self._progress[accumulation] = trainer.progress
            for name in HOOKS:
                called = getattr(hooks, name)
                around = [functools.partial(self._reach_in_hook, f"callback:{name}:{m}") for m in ("before", "after")]
                before, after = ([hook] if hook.args[0] in self.active_points else [] for hook in around)
                if name == "on_train_batch_start":
                    before.insert(0, functools.partial(self._begin, accumulation))
                if before or after:
                    setattr(hooks, name, (*before, *called, *after))
                    self._undo.callback(setattr, hooks, name, called)

        return init

    def _reach_in_hook(self, point: str, *_: Any) -> None:
        self._reach(point)

    def _begin(self, accumulation: Accumulation, *_: Any) -> None:
        self._work(accumulation)

    def _wrap_operation(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        before, half, after = (f"disk:{name}:{moment}" for moment in ("before", "half", "after"))

        def operation(*args: Any, **kwargs: Any) -> Any:
            paths = [os.fspath(value) for value in (*args, *kwargs.values()) if isinstance(value, os.PathLike)]
            self._reach(before, *paths)
            if half in self.active_points and (due := self.due(half, *paths)):
                original(*args, **kwargs)
                os.truncate(paths[0], os.path.getsize(paths[0]) // 2)
                self.happen(due)
                os.unlink(paths[0])  # it was a delay: the whole file has been written now
            result = original(*args, **kwargs)
            self._reach(after, *paths)
            return result

        return operation

    def _reach_at_step(self, point: str, optimizer: Optimizer, *_: Any) -> None:
        for accumulation in self._accumulations:
            if any(prepared.optimizer is optimizer for prepared in accumulation.optimizers):
                self._work(accumulation)
                self._reach(point)
                return

    def _wrap_prepare_model(self, original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def prepare_model(accelerator: Accelerator, *args: Any, **kwargs: Any) -> nn.Module:
            self._accumulations.add(accelerator.accumulation)
            return original(accelerator, *args, **kwargs)

        return prepare_model

    def _wrap_method(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(accelerator: Accelerator, *args: Any, **kwargs: Any) -> Callable[..., Any]:
            call = original(accelerator, *args, **kwargs)

            @functools.wraps(call)
            def run(*args: Any, **kwargs: Any) -> Any:
                self._inside = call  # the modules that it calls are a part of it
                try:
                    self._work(accelerator.accumulation)
                    self._reach("forward:before")
                    output = call(*args, **kwargs)
                    self._reach("forward:after")
                    return output
                finally:
                    self._inside = None

            return run

        return method

    def _enter_forward(self, module: nn.Module, *_: Any) -> None:
        if self._inside is not None or not torch.is_grad_enabled():
            return
        for accumulation in self._accumulations:
            if any(prepared in (module, module._modules.get("_orig_mod")) for prepared in accumulation.models):
                self._inside = module
                self._work(accumulation)
                self._reach("forward:before")
                return

    def _leave_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._inside is module:
            self._inside = None
            if output is not None:  # otherwise it raised an error
                self._reach("forward:after")


def _replace(undo: ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace a function with ``wrap(function)`` until ``undo`` closes."""
    if isinstance(owner, type):
        owner = next(kind for kind in owner.__mro__ if name in vars(kind))
    original = vars(owner)[name]
    undo.callback(setattr, owner, name, original)
    setattr(owner, name, functools.wraps(original)(wrap(original)))
