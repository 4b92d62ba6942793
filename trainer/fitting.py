"""What happens in ``fit`` before the first step: optimizers, placement, restoring, the sanity check."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from ..engine import isolated_random_state
from ..strategies import warn
from . import restore, summary
from .evaluation import evaluate
from .hooks import Hooks
from .last_step import LastStep
from .loop import FitLoop
from .optimizers import SchedulerConfig, check_ownership, parse_optimizers
from .sources import Sources
from .storable import check_storable
from .task import TaskModule

if TYPE_CHECKING:
    from .trainer import Trainer


def run_fit(trainer: Trainer, task: TaskModule, hooks: Hooks, sources: Sources) -> None:
    """Prepare everything, restore a checkpoint if there is one to go on from, and train."""
    accelerator = trainer.accelerator
    if not task.automatic_optimization:
        raise ValueError(
            "automatic_optimization=False is not supported yet: drive the optimizers in a loop of your own with "
            "treadle.Accelerator."
        )
    if trainer.ckpt_path is None:
        trainer.progress.restart_epoch()
        trainer.metrics.reset()
    _check_steps(task)
    model = accelerator.prepare_model(task, step="training_step")
    optimizers, schedulers = _configure(task)  # now that the parameters are where and what they will be
    trainer.lr_scheduler_configs = schedulers
    for optimizer in optimizers:
        accelerator.prepare_optimizer(optimizer)
    accelerator.schedulers.extend(config.scheduler for config in schedulers)
    accelerator.agree_on_steps(finite=trainer.on_nonfinite != "ignore", at_once=trainer.on_nonfinite == "skip")
    if trainer.ckpt_path is not None:
        accelerator.load_state(trainer.ckpt_path, state=False)
    for hook in hooks.on_fit_start:
        hook()
    trainer.logbook.describe(task, trainer.datamodule)
    loader = sources.train
    loader.epoch = trainer.progress.epoch
    _check_validation(trainer, task, sources)
    restore.register(trainer)
    random_state = restore.restore_run(trainer, trainer.ckpt_path)
    if trainer.ckpt_path is not None:
        trainer.progress.recount(loader.batches)
    check_storable(trainer, task)
    if any(callback.save_on_exception for callback in trainer.checkpoint_callbacks):
        trainer.last_step = LastStep(trainer, task)
        trainer.last_step.attach(hooks)
    summary.announce_fit(trainer, loader)
    if trainer.ckpt_path is None and trainer.num_sanity_val_steps and trainer.has_validation:
        _sanity_check(trainer, hooks)
    _warn_of_evaluation_mode(task)
    with trainer.logging_to(trainer.metrics):
        FitLoop(trainer, task, model, hooks, loader, schedulers, partial(validate, trainer)).run(random_state)
    for hook in hooks.on_fit_end:
        hook()


def _check_steps(task: TaskModule) -> None:
    name = type(task).__name__
    if type(task).training_step is TaskModule.training_step:
        raise ValueError(f"{name} needs a training_step that returns the loss.")
    if type(task).configure_optimizers is TaskModule.configure_optimizers:
        raise ValueError(
            f"{name} needs a configure_optimizers that returns an optimizer, or None to train without one."
        )


def _configure(task: TaskModule) -> tuple[list[torch.optim.Optimizer], list[SchedulerConfig]]:
    optimizers, schedulers = parse_optimizers(task.configure_optimizers())
    check_ownership(task, optimizers, schedulers)
    if len(optimizers) > 1:
        raise ValueError(
            f"{type(task).__name__}.configure_optimizers returned {len(optimizers)} optimizers; automatic optimization "
            "steps one. Put their parameters into groups of one optimizer."
        )
    return optimizers, schedulers


def _check_validation(trainer: Trainer, task: TaskModule, sources: Sources) -> None:
    """Say so if half of what validation needs is there."""
    loaders = sources.evaluation("val")
    has_step = type(task).validation_step is not TaskModule.validation_step
    if loaders and not has_step:
        warn(f"there is a validation loader, but {type(task).__name__} has no validation_step: nothing is validated.")
    if has_step and not loaders and trainer.limit_val_batches:
        warn(f"{type(task).__name__} has a validation_step, but there is no validation loader: nothing is validated.")


def _warn_of_evaluation_mode(task: TaskModule) -> None:
    """Modes are left as the user set them, so that a frozen part stays in evaluation mode; but say so."""
    names = [name or type(task).__name__ for name, part in task.named_modules() if not part.training]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warn(
            f"{', '.join(names[:3])}{more} will be trained in evaluation mode (no dropout, fixed batch norm), as you "
            "left it. If that is not wanted, call train() on it before fit."
        )


def _sanity_check(trainer: Trainer, hooks: Hooks) -> None:
    """Validate a few batches, so that an error in validation shows now; nothing that training draws is changed."""
    stream = trainer.accelerator.stream
    assert stream is not None
    order = dict(stream.state)
    trainer.sanity_checking = True
    try:
        with isolated_random_state():
            for hook in hooks.on_sanity_check_start:
                hook()
            validate(trainer, trainer.num_sanity_val_steps)
            for hook in hooks.on_sanity_check_end:
                hook()
    finally:
        trainer.sanity_checking = False
    stream.state = order
    for loader in trainer.sources.evaluation("val"):  # type: ignore[union-attr]
        loader.epoch = 0
    trainer.logbook.clear()


def validate(trainer: Trainer, steps: int = -1) -> None:
    """Validate within ``fit``.

    Args:
        trainer: whose task and loaders are used.
        steps: batches of each loader; -1 for all.
    """
    assert trainer.task is not None
    assert trainer.hooks is not None
    assert trainer.sources is not None
    loaders = trainer.sources.evaluation("val")
    full = [loader.limit for loader in loaders]
    for loader in loaders:
        if steps >= 0:
            loader.limit = steps if loader.limit is None else min(steps, loader.limit)
    evaluate(trainer, trainer.task, trainer.hooks, loaders, "validate", within_fit=True)
    for loader, limit in zip(loaders, full, strict=True):
        loader.limit = limit
