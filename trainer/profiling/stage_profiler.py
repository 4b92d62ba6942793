"""Profiling of a stage: functions that the loop calls are replaced by measured ones until the stage ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ...common.messages import describe_error, warn
from ...common.mirror import local_folder
from ...engine import Loader
from ...engine.profilers import PassThroughProfiler, Profiler
from ..loop import Hooks, name_of

if TYPE_CHECKING:
    from ..trainer import Trainer

_ABSENT = object()
_CHECKPOINTER = {"save_state": "checkpoint"}
_ACCUMULATION = {"backward": "backward", "exchange_votes": "agree"}
_STRATEGY = {"clip_grad_norm_": "clip", "clip_grad_value_": "clip"}
_LOGBOOK = {
    "write_step": "logging by step",
    "update_epoch": "logging by epoch",
    "keep_step_values": "logging by epoch",
    "write_row": "logging to the loggers",
}
_STEPS = {"training_step": "forward"}


class _SafeProfiler(Profiler):
    """The calls of a profiler in a stage. An error disables them with a warning, unless the profiler is ``strict``."""

    def __init__(self, profiler: Profiler) -> None:
        super().__init__()
        self.wrapped = profiler
        self._failed = False
        for method in ("start", "stop", "step", "describe"):
            setattr(self, method, functools.partial(self._call, method))

    def _call(self, method: str, *args: Any) -> None:
        if self._failed:
            return
        try:
            getattr(self.wrapped, method)(*args)
        except Exception as error:
            if getattr(self.wrapped, "strict", False):
                raise
            self._failed = True
            name = type(self.wrapped).__name__
            warn(f"{name}.{method} failed, so the profiler is disabled: {describe_error(error)}")


class Profiled:
    """Measured replacements of the functions that one stage calls.

    Args:
        trainer: Trainer with the profiler.
        hooks: Dispatch table of the stage.
        stage: Name of the stage.
    """

    def __init__(self, trainer: Trainer, hooks: Hooks, stage: str) -> None:
        self.trainer = trainer
        self.profiler = _SafeProfiler(trainer.profiler)
        self.stage = stage
        self._replaced: list[tuple[Any, str, Any]] = []
        accelerator, profiler = trainer.accelerator, trainer.profiler
        profiler.device, profiler.model = accelerator.device, trainer.task
        root = trainer.default_root_dir
        needs_directory = profiler.dirpath is None and profiler.needs_directory
        folder = trainer.logbook.agree_on_directory(root) if needs_directory else root
        # Scripts that run in one process read fit-NAME.txt, as in Lightning.
        profiler.setup(stage, trainer.global_rank if trainer.world_size > 1 else None, str(local_folder(folder)))
        for owner, names in (
            (accelerator.checkpointer, _CHECKPOINTER),
            (accelerator.accumulation, _ACCUMULATION),
            (accelerator.strategy, _STRATEGY),
            (trainer.logbook, _LOGBOOK),
        ):
            for method, action in names.items():
                self._measure(owner, method, action)
        for method in ("method", "local_method"):
            self._replace(accelerator, method, functools.partial(self._measure_method, getattr(accelerator, method)))
        self._replace(accelerator, "prepare_data_loader", self._measure_loaders(accelerator.prepare_data_loader))
        self._replace(accelerator, "prepare_optimizer", self._measure_optimizers(accelerator.prepare_optimizer))
        for name, functions in list(vars(hooks).items()):
            if isinstance(functions, tuple):
                setattr(hooks, name, tuple(self._measure_hook(name, function) for function in functions))
        self._follow_steps(hooks)

    def end(self, stage: str) -> None:
        """Restore all functions and show the report.

        Args:
            stage: Name of the stage.
        """
        for owner, name, value in reversed(self._replaced):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._replaced.clear()
        self.trainer.profiled = None
        profiler = self.trainer.profiler
        try:
            self.profiler.describe()
        finally:
            profiler.teardown(stage)
            profiler.model = None

    # -- measurements --------------------------------------------------------------------------------------------

    def _measure(self, owner: Any, method: str, action: str) -> None:
        self._replace(owner, method, measured(self.profiler, action, getattr(owner, method)))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def _measure_method(self, find: Callable[..., Any], model: Any, name: str) -> Any:
        return measured(self.profiler, _STEPS.get(name, name), find(model, name))

    def _measure_optimizers(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_optimizer(*args: Any, **kwargs: Any) -> Any:
            prepared = prepare(*args, **kwargs)
            if "step" not in vars(prepared):
                self._measure(prepared, "step", "optimizer")
                self._measure(prepared, "zero_grad", "zero_grad")
            return prepared

        return prepare_optimizer

    def _measure_loaders(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_data_loader(*args: Any, **kwargs: Any) -> Any:
            loader = prepare(*args, **kwargs)
            if "_begin" not in vars(loader):
                self._watch(loader)
            return loader

        return prepare_data_loader

    def _watch(self, loader: Loader) -> None:
        """Measure the wait for a dataloader's batches, and their transfer to the device."""
        part = f" of {self.stage}" if self.stage != "fit" else " of validation" if loader.evaluation else ""
        begin, action = loader._begin, f"data{part}"

        def batches() -> Iterator[Any]:
            return self.profiler.profile_iterable(begin(), action)

        self._replace(loader, "_begin", batches)
        if loader.move is not None:
            self._measure(loader, "move", f"transfer{part}")
        self.trainer.profiler.advice[action] = _advise(loader)

    def _measure_hook(self, name: str, function: Any) -> Any:
        if function == self.trainer.update_train_epoch_values:
            return function  # the logbook is measured instead
        text = name_of(function)
        owner = getattr(getattr(function, "func", function), "__self__", None)
        if owner is not None:
            text = f"{type(owner).__name__}.{name}"
        run = measured(self.profiler, f"hook {text}", function)
        run.__qualname__ = name_of(function)  # errors name the hook
        return run

    def _follow_steps(self, hooks: Hooks) -> None:
        """Call the profiler's ``step``, if overridden, after each training step or evaluation batch."""
        profiler = self.profiler
        if type(profiler.wrapped).step is Profiler.step:
            return
        name = {"fit": "on_step_end", "validate": "on_validation_batch_end"}.get(
            self.stage, f"on_{self.stage}_batch_end"
        )
        setattr(hooks, name, (*getattr(hooks, name), lambda *_: profiler.step()))


def begin(trainer: Trainer, hooks: Hooks, stage: str) -> None:
    """Measure a stage until its teardown, if there is a profiler."""
    if not isinstance(trainer.profiler, PassThroughProfiler):
        trainer.profiled = Profiled(trainer, hooks, stage)
        setattr(hooks, "teardown", (*hooks.teardown, trainer.profiled.end))  # noqa: B010  # as `Hooks` itself sets them


def measured_in(trainer: Trainer, action: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, measured by the Trainer's profiler; unchanged without a profiler."""
    if isinstance(trainer.profiler, PassThroughProfiler) or trainer.profiled is None:
        return function
    return measured(trainer.profiled.profiler, action, function)


def measured(profiler: Profiler, action: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, measured as an action of ``profiler``."""
    start, stop = profiler.start, profiler.stop

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        start(action)
        try:
            return function(*args, **kwargs)
        finally:
            stop(action)

    return run


def _advise(loader: Loader) -> str:
    workers = getattr(loader.source, "num_workers", None)
    if workers is None:
        return "The batches do not come from a DataLoader, which could read them in other processes (num_workers)."
    if not workers:
        return "The dataloader reads in this process. Set num_workers to read in other processes."
    text = f"num_workers={workers} is not enough. Raise it, or make the transforms faster."
    if not getattr(loader.source, "persistent_workers", True):
        text += " Set persistent_workers=True to start the workers once, not in each epoch."
    return text
