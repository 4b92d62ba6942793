"""One stage of a run (``fit``, ``validate``, ``test``, ``predict``): set up, worked, and torn down whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...strategies.distributed import hide_frames
from .. import arguments
from ..checkpointing import resolve
from ..core import DataModule, TaskModule, log_to, task_modules
from ..default_callbacks import as_callbacks
from ..preflight import same_settings
from ..profiling import stage_profiler
from . import error_notes, run_summary
from .dataloaders import KINDS, Sources, check_kinds
from .hook_table import Hooks, name_of

if TYPE_CHECKING:
    from ..trainer import Trainer

Work = Callable[[TaskModule, Hooks, Sources], Any]
_SPENT_ON = {"fit": "setup", "validate": "validation", "test": "test", "predict": "predict"}


def run_stage(
    trainer: Trainer,
    stage: str,
    task: TaskModule | None,
    given: dict[str, Any],
    datamodule: DataModule | None,
    ckpt_path: str | Path | None,
    work: Work | None,
) -> Any:
    """Set a stage up, do its work, and tear it down whatever happened.

    Args:
        trainer: who runs it.
        stage: its name.
        task: the user's task; None for the one of the stage before.
        given: the loaders that were passed, by kind; the first may be a data module.
        datamodule: what gives the loaders instead.
        ckpt_path: what to restore, a path or a word.
        work: the stage itself; None ends it with the searches before it.
    """
    if trainer.stage is not None:
        raise ValueError(
            f"trainer.{stage} was called within trainer.{trainer.stage}, which could not go on with its own model and "
            "optimizers. Call it afterwards, or on a Trainer of its own."
        )
    task = uncompiled(task)
    first = next(iter(given))
    if isinstance(given[first], DataModule):
        given, datamodule = {**given, first: None}, given[first]
    if task is None:
        task, ckpt_path = _last_task(trainer, stage, ckpt_path)
        datamodule = datamodule or (None if any(v is not None for v in given.values()) else trainer.datamodule)
    check_kinds(stage, task, datamodule)
    if datamodule is not None and any(loader is not None for loader in given.values()):
        raise ValueError("pass loaders or a datamodule, not both.")
    trainer.stage, trainer.task, trainer.datamodule = stage, task, datamodule
    trainer.hooks = trainer.ckpt_path = trainer.opened_checkpoint = trainer.last_step = trainer.steps = None
    trainer.should_stop = trainer.interrupted = False
    failure: BaseException | None = None
    try:
        with trainer.history.spending(_SPENT_ON[stage]):
            hooks, sources = _setup(trainer, stage, task, given, ckpt_path)
            if any(callback.searches for callback in trainer.callbacks):
                from ..tuning import run_searches  # 10 ms, for which no import has to wait

                run_searches(trainer)
            if work is None:
                return None
            with trainer.init_module():
                task.configure_model()
            task.trainer = trainer  # also of the tasks in it that setup or configure_model made
            with torch.autograd.set_detect_anomaly(True) if trainer.detect_anomaly else nullcontext():
                return work(task, hooks, sources)
    except BaseException as error:
        failure = error
        trainer.interrupted = isinstance(error, KeyboardInterrupt)
        _tell_of(trainer, error)
        raise
    finally:
        _teardown(trainer, stage, task, failure)


def _last_task(trainer: Trainer, stage: str, ckpt_path: Any) -> tuple[TaskModule, Any]:
    """Return the task of the last stage and, if a ``ModelCheckpoint`` has one, its best checkpoint.

    Raises:
        ValueError: if there was no stage yet.
    """
    if trainer.task is None:
        raise ValueError(f"{stage} needs a model: pass one, or call fit first.")
    best = "" if trainer.checkpoint_callback is None else trainer.checkpoint_callback.best_model_path
    return trainer.task, ckpt_path or (best or None)


def uncompiled(task: Any) -> Any:
    """The task itself of what ``torch.compile(task)`` returned; it remembers how its parts are to be compiled."""
    inner = getattr(task, "_modules", {}).get("_orig_mod")
    if not isinstance(inner, TaskModule):
        return task
    inner.__dict__["_compiler"] = task.dynamo_ctx
    return inner


def _setup(
    trainer: Trainer, stage: str, task: TaskModule, given: dict[str, Any], ckpt_path: Any
) -> tuple[Hooks, Sources]:
    accelerator, datamodule = trainer.accelerator, trainer.datamodule
    task.trainer = trainer
    if datamodule is not None:
        datamodule.trainer = trainer
    accelerator.forget_prepared()
    added = as_callbacks("what configure_callbacks returns", task.configure_callbacks())
    trainer.callbacks = [c for c in trainer.callbacks if type(c) not in {type(a) for a in added}] + added
    for callback in trainer.callbacks:
        callback._task = task
    trainer.hooks = hooks = Hooks(trainer, task, trainer.callbacks)
    accelerator.compare_settings(same_settings(trainer, stage, task, ckpt_path))
    trainer.opened_checkpoint = opened = resolve.find_checkpoint(trainer, stage, ckpt_path)
    trainer.ckpt_path = None if opened is None else opened.path
    limits = {kind: getattr(trainer, f"limit_{kind}_batches") for kind in KINDS}
    shard = trainer.use_distributed_sampler
    one_order = stage == "fit" and trainer.overfit_batches > 0
    trainer.sources = sources = Sources(task, datamodule, given, accelerator, limits, shard, one_order)
    trainer.logbook.agree_on_versions()
    stage_profiler.begin(trainer, hooks, stage)
    with accelerator.world.together():
        for owner in (datamodule, task):
            if owner is None:
                continue
            per_node = arguments.check_bool("prepare_data_per_node", owner.prepare_data_per_node)
            if accelerator.is_local_main_process if per_node else accelerator.is_main_process:
                owner.prepare_data()
    if datamodule is not None:
        datamodule.setup(stage)
    for hook in hooks.setup:
        hook(stage)
    return hooks, sources


def _teardown(trainer: Trainer, stage: str, task: TaskModule, failure: BaseException | None) -> None:
    """Give everyone the chance to clean up; the first cause, if there is one, stays the error."""
    try:
        _clean_up(trainer, stage, task, failure)
    finally:  # a second Ctrl-C may end that early
        log_to(task, None)
        trainer.stage = trainer.steps = trainer.opened_checkpoint = None
        for callback in trainer.callbacks:
            callback._task = None
        if isinstance(failure, KeyboardInterrupt):
            run_summary.announce_interrupt(trainer, stage, error_notes.place(trainer, stage, failure))


def _clean_up(trainer: Trainer, stage: str, task: TaskModule, failure: BaseException | None) -> None:
    errors: list[Exception] = []
    owners = () if trainer.datamodule is None else (trainer.datamodule.teardown,)
    for clean_up in (*owners, *(trainer.hooks.teardown if trainer.hooks is not None else ())):
        try:
            clean_up(stage)
        except Exception as error:
            errors.append(error)
            if failure is not None:
                failure.add_note(f"in the teardown after it, {clean_up!r} raised {type(error).__name__}: {error}")
    for one in (trainer.steps, trainer.last_step):
        if one is not None:
            one.close()
    for part in task_modules(task):
        TaskModule.untoggle_optimizer(part)  # an error may have come in between
    trainer.accelerator.close_loaders()
    trainer.logbook.call("finalize", "success" if failure is None else "failed")
    if errors and failure is None:
        hide_frames(errors[0])
        raise errors[0]


def _tell_of(trainer: Trainer, error: BaseException) -> None:
    error_notes.annotate(error, trainer)
    hide_frames(error)
    owners = () if trainer.datamodule is None else (trainer.datamodule.on_exception,)
    for hook in (*(trainer.hooks.on_exception if trainer.hooks is not None else ()), *owners):
        try:
            hook(error)
        except Exception as second:
            error.add_note(f"while it was handled, {name_of(hook)} raised {type(second).__name__}: {second}")
