"""What happens in ``fit`` before the first step: optimizers, placement, restoring, the sanity check."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from ..engine import isolated_random_state
from . import restore, summary
from .evaluation import evaluate
from .hooks import Hooks
from .loop import FitLoop
from .optimizers import SchedulerConfig, parse_optimizers
from .sources import Sources
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
    optimizers, schedulers = _configure(task)
    trainer.lr_scheduler_configs = schedulers
    model = accelerator.prepare_model(task, step="training_step")
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
    sources.evaluation("val")
    restore.register(trainer)
    random_state = restore.restore_run(trainer, trainer.ckpt_path)
    summary.announce_fit(trainer, loader)
    if trainer.ckpt_path is None and trainer.num_sanity_val_steps and trainer.has_validation:
        _sanity_check(trainer, hooks)
    task.train()
    with trainer.logging_to(trainer.metrics):
        FitLoop(trainer, task, model, hooks, loader, schedulers, partial(validate, trainer)).run(random_state)
    for hook in hooks.on_fit_end:
        hook()


def _configure(task: TaskModule) -> tuple[list[torch.optim.Optimizer], list[SchedulerConfig]]:
    name = type(task).__name__
    if type(task).training_step is TaskModule.training_step:
        raise ValueError(f"{name} needs a training_step that returns the loss.")
    if type(task).configure_optimizers is TaskModule.configure_optimizers:
        raise ValueError(
            f"{name} needs a configure_optimizers that returns an optimizer, or None to train without one."
        )
    optimizers, schedulers = parse_optimizers(task.configure_optimizers())
    if len(optimizers) > 1:
        raise ValueError(
            f"{name}.configure_optimizers returned {len(optimizers)} optimizers; automatic optimization steps one. Put "
            "their parameters into groups of one optimizer."
        )
    return optimizers, schedulers


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
        if steps >= 0:
            loader.epoch = 0
