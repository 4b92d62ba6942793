"""One stage of a run: its setup, its work and its teardown."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...common.messages import describe_error
from ...common.mirror import flush
from ...engine import uneven_counts
from ...engine.preemption import Preempted
from ...strategies.distributed import hide_frames, name_phase
from ...strategies.processes import leave_on_sigterm, mark_stage
from .. import arguments
from ..checkpointing import CheckpointResolver
from ..core import DataModule, TaskModule, log_to, task_modules
from ..default_callbacks import as_callbacks
from ..preflight import collect_settings
from ..profiling import stage_profiler
from ..states import TrainerFn, TrainerStatus
from . import error_notes
from .dataloaders import KINDS, Sources, check_kinds
from .hook_table import Hooks, name_of, pass_by_keyword
from .run_summary import announce_interrupt

if TYPE_CHECKING:
    from ..trainer import Trainer

Work = AbstractContextManager[Callable[[], Any]]
"""Preparation of a stage that yields the function which runs it, so that it is no frame above a user's step."""
_SPENT_ON = {"fit": "setup", "validate": "validation", "test": "test", "predict": "predict"}


class Stage:
    """One stage with its task, its data, and its error, if any.

    Args:
        trainer: Trainer that runs the stage.
        name: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        task: The user's task; None for the task of the last stage.
        loaders: Dataloaders that the user passed, by kind; the first may be a data module.
        datamodule: Data module to use instead of dataloaders.
        ckpt_path: Checkpoint to restore, or None.

    Raises:
        TypeError, ValueError: If an argument is invalid, or another stage is running.
    """

    def __init__(
        self,
        trainer: Trainer,
        name: str,
        task: TaskModule | None,
        loaders: dict[str, Any],
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> None:
        if trainer.stage is not None:
            raise ValueError(
                f"trainer.{name} was called within trainer.{trainer.stage}, whose model and optimizers would be lost. "
                f"Call it after {trainer.stage}, or on another Trainer."
            )
        first = next(iter(loaders))
        if isinstance(loaders[first], DataModule):
            loaders, datamodule = {**loaders, first: None}, loaders[first]
        has_loaders = any(loader is not None for loader in loaders.values())
        task = uncompiled(task)
        self.got_task = task is not None
        if task is None:
            task, ckpt_path = _last_task(trainer, name, ckpt_path)
            datamodule = datamodule or (None if has_loaders else trainer.datamodule)
        check_kinds(name, task, datamodule)
        if datamodule is not None and has_loaders:
            raise ValueError(f"{name} got both dataloaders and a datamodule. Pass only one of the two.")
        self.trainer, self.name, self.task = trainer, name, task
        self.loaders, self.datamodule, self.ckpt_path = loaders, datamodule, ckpt_path
        self.failure: BaseException | None = None

    def run(self, work: Callable[[TaskModule, Hooks, Sources], Work] | None) -> Any:
        """Run the stage with its setup and teardown, and return the result of the function of ``work``.

        Args:
            work: Function that prepares the stage; None ends it after the tuning searches.
        """
        trainer, task = self.trainer, self.task
        trainer.stage = trainer.latest_stage = self.name
        trainer.status = TrainerStatus.RUNNING
        trainer.task, trainer.datamodule = task, self.datamodule
        if self.name == "fit":
            trainer.min_epochs = trainer.min_epochs or 0
            if trainer.max_epochs is None:  # in Lightning too, these flags stay None until the first fit
                trainer.max_epochs = 1000 if trainer.max_steps == -1 and trainer.max_seconds is None else -1
        trainer.hooks = trainer.ckpt_path = trainer.opened_checkpoint = trainer.last_step = trainer.steps = None  # type: ignore[assignment]
        trainer.should_stop = trainer.interrupted = False
        trainer.logbook.clear()  # values read after a stage belong to that stage
        exits = False  # with `sys.exit`
        mark_stage(running=True)
        with _enable_gradients() if self.name == "fit" else nullcontext():
            try:
                with trainer.history.spending(_SPENT_ON[self.name]):
                    with trainer.preemption.leaving_at_once():
                        hooks, sources = self._set_up()
                    if any(callback.searches for callback in trainer.callbacks):
                        from ..tuning import run_searches  # imported here, because it takes 10 ms

                        run_searches(trainer)
                    if work is None:
                        return None
                    with trainer.preemption.leaving_at_once(), trainer.init_module():
                        task.configure_model()
                    task.trainer = trainer  # also of the nested tasks that setup or configure_model created
                    anomalies = torch.autograd.set_detect_anomaly(True) if trainer.detect_anomaly else nullcontext()
                    with anomalies, uneven_counts(task, trainer.accelerator.world), work(task, hooks, sources) as run:
                        return run()
            except BaseException as error:
                self.failure = error
                trainer.status = TrainerStatus.INTERRUPTED
                trainer.interrupted = isinstance(error, KeyboardInterrupt)
                leave_on_sigterm()
                exits = isinstance(error, SystemExit) and not isinstance(error, Preempted)
                if exits and trainer.accelerator.watchdog is not None:
                    trainer.accelerator.watchdog.exit.awaits_others = False  # the others may wait for this rank forever
                trainer.preemption.note_failure()
                self._call_on_exception(error)
                raise
            finally:
                try:
                    self._tear_down()
                finally:
                    mark_stage(running=False, exiting=exits and not getattr(self.failure, "code", None))

    @name_phase("setup", loop=True)
    def _set_up(self) -> tuple[Hooks, Sources]:
        trainer, task, datamodule = self.trainer, self.task, self.datamodule
        accelerator = trainer.accelerator
        task.trainer = trainer
        if datamodule is not None:
            datamodule.trainer = trainer
        accelerator.forget_prepared()
        added = as_callbacks("the result of configure_callbacks", task.configure_callbacks())
        trainer.callbacks = [c for c in trainer.callbacks if type(c) not in {type(a) for a in added}] + added
        for callback in trainer.callbacks:
            callback.__dict__["_task"] = task  # in a callback that is a module too, it must not be a submodule
        trainer.hooks = hooks = Hooks(trainer, task, trainer.active_callbacks)
        accelerator.compare_settings(collect_settings(trainer, self.name, task, self.ckpt_path))
        trainer.checkpointer.remember_owners(task, datamodule)
        resolver = CheckpointResolver(trainer, self.name, self.ckpt_path, self.got_task)
        trainer.opened_checkpoint = opened = resolver.resolve()
        trainer.ckpt_path = None if opened is None else str(opened.path)
        limits = {kind: getattr(trainer, f"limit_{kind}_batches") for kind in KINDS}
        shard = trainer.use_distributed_sampler
        one_order = self.name == "fit" and trainer.overfit_batches > 0
        trainer.sources = sources = Sources(task, datamodule, self.loaders, accelerator, limits, shard, one_order)
        trainer.logbook.agree_on_versions()
        stage_profiler.begin(trainer, hooks, self.name)
        with accelerator.world.failing_together():
            for owner in (datamodule, task):
                if owner is None:
                    continue
                per_node = arguments.check_bool("prepare_data_per_node", owner.prepare_data_per_node)
                if accelerator.is_local_main_process if per_node else accelerator.is_main_process:
                    owner.prepare_data()
        if datamodule is not None:
            pass_by_keyword(datamodule.setup, "stage")(TrainerFn(self.name))
        for hook in hooks.setup:
            hook(TrainerFn(self.name))
        return hooks, sources

    def _call_on_exception(self, error: BaseException) -> None:
        trainer = self.trainer
        error_notes.annotate(error, trainer)
        hide_frames(error)
        owners = () if self.datamodule is None else (self.datamodule.on_exception,)
        for hook in (*(trainer.hooks.on_exception if trainer.hooks is not None else ()), *owners):
            try:
                hook(error)
            except BaseException as second:  # not even `sys.exit` may replace the first error, and with it the status
                error.add_note(f"while this error was handled, {name_of(hook)} raised {describe_error(second)}")
                if isinstance(second, KeyboardInterrupt):  # the user does not want to wait for the other hooks
                    break

    def _tear_down(self) -> None:
        """Run all cleanups. An error that the stage raised takes precedence over errors in the cleanups."""
        trainer = self.trainer
        status = TrainerStatus.INTERRUPTED
        try:
            self._clean_up()
            if self.failure is None:
                status = TrainerStatus.FINISHED
        finally:  # even if a second Ctrl-C interrupts the cleanup
            trainer.status = status
            log_to(self.task, None)
            trainer.stage = trainer.steps = trainer.opened_checkpoint = None
            for callback in trainer.callbacks:
                callback.__dict__["_task"] = None
            if isinstance(self.failure, KeyboardInterrupt):
                announce_interrupt(trainer, self.name, error_notes.place(trainer, self.name, self.failure))

    @name_phase("teardown", loop=True)
    def _clean_up(self) -> None:
        trainer, failure = self.trainer, self.failure
        errors: list[BaseException] = []
        owners = () if self.datamodule is None else (pass_by_keyword(self.datamodule.teardown, "stage"),)
        of_hooks = trainer.hooks.teardown if trainer.hooks is not None else ()
        for clean_up in (*owners, *of_hooks, trainer.checkpointer.finish_plugin):
            try:
                clean_up(TrainerFn(self.name))
            except BaseException as error:
                self._note_in_teardown(name_of(clean_up), error)
                errors.append(error)
                if isinstance(error, KeyboardInterrupt):
                    break
        for resource in (trainer.steps, trainer.last_step):
            if resource is not None:
                resource.close()
        trainer.accelerator.strategy.stop_reducing()  # a backward pass after fit is of one rank
        for module in task_modules(self.task):
            TaskModule.untoggle_optimizer(module)  # an error may have come in between
        trainer.accelerator.close_loaders()
        if failure is None and trainer.accelerator.saving is None:
            trainer.accelerator.world.release_background_world()
        try:
            trainer.logbook.call_loggers("finalize", "success" if failure is None else "failed")
        except BaseException as error:  # raised by a strict logger
            self._note_in_teardown("the finalize method of a logger", error)
            errors.append(error)
        flush()
        if failure is None:
            first = errors[0] if errors else None
            if first is not None:
                hide_frames(first)
            # A rank that left without an error would otherwise go unnoticed: torchrun takes its exit status, 0, for
            # success.
            trainer.accelerator.world.raise_together(first)
            trainer.preemption.agree_on_signal()  # about a signal that arrived after the last step

    def _note_in_teardown(self, what: str, error: BaseException) -> None:
        if self.failure is not None:
            self.failure.add_note(f"in the teardown after this error, {what} raised {describe_error(error)}")


def _enable_gradients() -> AbstractContextManager[Any]:
    """Return a context in which gradients are computed, for a caller that disabled them.

    The caller may not know: a generator that is suspended within ``torch.no_grad`` disables them for everyone.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else torch.enable_grad()


def _last_task(trainer: Trainer, stage: str, ckpt_path: Any) -> tuple[TaskModule, Any]:
    """Return the task of the last stage, and ``ckpt_path``, which defaults to the best checkpoint, if there is one."""
    if trainer.task is None:
        other = "" if stage == "fit" else ", or call fit first"
        raise ValueError(f"{stage} needs a model. Pass a TaskModule as model{other}.")
    saving = trainer.checkpoint_callback if trainer.checkpoint_callbacks else None
    return trainer.task, ckpt_path or (saving and saving.best_model_path) or None


def uncompiled(task: Any) -> Any:
    """Return the task that ``torch.compile`` wrapped, with its compilation settings; return other values unchanged."""
    inner = getattr(task, "_modules", {}).get("_orig_mod")
    if not isinstance(inner, TaskModule):
        return task
    inner.__dict__["_compiler"] = task.dynamo_ctx
    return inner
