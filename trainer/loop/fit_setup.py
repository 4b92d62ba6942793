"""What happens in ``fit`` before the first step: optimizers, placement, restoring, the sanity check."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from ...callbacks import LatestValidation
from ...common.messages import warn
from ...engine import isolated_random_state, list_unused
from ..checkpointing import LastStep
from ..core import SchedulerConfig, TaskModule, check_ownership, endless, parse_optimizers
from ..preflight import check_monitors, check_same_optimizers, check_storable, warn_of_untrained
from ..profiling import measured
from . import run_summary
from .dataloaders import Sources
from .evaluation_loop import EvaluationLoop
from .fit_loop import FitLoop
from .hook_table import Hooks

if TYPE_CHECKING:
    from ..trainer import Trainer


def run_fit(trainer: Trainer, schedule: str | None, task: TaskModule, hooks: Hooks, sources: Sources) -> None:
    """Prepare everything, restore a checkpoint if there is one to resume from, and train.

    Args:
        trainer: who trains.
        schedule: see `Accelerator.load_state`.
        task, hooks, sources: of this stage.
    """
    if trainer.ckpt_path is None:
        trainer.progress.restart_epoch()
        trainer.progress.seconds = 0.0
        trainer.logbook.watch = LatestValidation()
        trainer.progress.loaded = trainer.progress.epoch
        trainer.metrics.reset()
    with trainer.checkpointer.ahead(trainer.opened_checkpoint):
        new = _ask_again(trainer, sources)
        model, random_state = _prepare(trainer, schedule, task, hooks, sources, new)
    loader = sources.train
    trainer.accelerator.draw_apart()  # the data is there; the sanity check leaves no trace in what is drawn
    run_summary.announce_fit(trainer, loader)
    sanity_check = trainer.ckpt_path is None and trainer.num_sanity_val_steps and trainer.has_validation
    if sanity_check:
        _sanity_check(trainer, hooks)
    check_monitors(trainer, trainer.logbook.newest if sanity_check else None)
    _warn_of_evaluation_mode(task)
    warn_of_untrained(trainer, task)
    with trainer.logging_to(trainer.metrics):
        run_validation = measured(trainer.profiler, "validation", partial(validate, trainer))
        loop = FitLoop(trainer, task, model, hooks, loader, trainer.lr_scheduler_configs, run_validation)
        measured(trainer.profiler, "training", loop.run)(random_state)
    if idle := list_unused(task):
        warn(f"compiled in vain, as the steps never call it (but its methods, maybe): {', '.join(idle)}.")
    for hook in hooks.on_fit_end:
        hook()


def _prepare(
    trainer: Trainer, schedule: str | None, task: TaskModule, hooks: Hooks, sources: Sources, new: bool
) -> tuple[Any, Any]:
    """All that comes before the sanity check; returns the wrapped model, and the random state to go on with.

    Args:
        trainer, schedule, task, hooks, sources: see `run_fit`.
        new: the epoch begins with new loaders, which go on from nowhere.
    """
    accelerator = trainer.accelerator
    prepare_training(trainer, task)
    if trainer.opened_checkpoint is not None:
        accelerator.load_state(trainer.opened_checkpoint, state=False)
    for hook in hooks.on_fit_start:
        hook()
    trainer.logbook.describe(task, trainer.datamodule, trainer.enable_autolog_hparams)
    model = wrap(trainer, task)  # a callback may have chosen what is trained
    loader = sources.train
    loader.set_epoch(trainer.progress.epoch)
    _check_validation(trainer, task, sources)
    trainer.checkpointer.register()
    made = [(one, one.state_dict()) for one in (sources.asked if new else [])]
    random_state = trainer.checkpointer.restore_run(trainer.opened_checkpoint, schedule)
    trainer.opened_checkpoint = None  # all is restored: nothing of it has to stay in memory
    if new:
        trainer.progress.loaded = trainer.progress.epoch
    for one, state in made:
        one.load_state_dict(state)
    if trainer.ckpt_path is not None:
        trainer.progress.recount(loader.batches)
        trainer.logbook.call("go_on", trainer.progress.step)
    check_storable(trainer, task)
    if any(callback.save_on_exception for callback in trainer.checkpoint_callbacks):
        trainer.last_step = LastStep(trainer, task)
        trainer.last_step.attach(hooks)
    return model, random_state


def _ask_again(trainer: Trainer, sources: Sources) -> bool:
    """Ask for the loaders that a run which goes on had in its epoch, as of the epoch in which it asked for them.

    Returns:
        Whether that is the epoch which begins now.
    """
    every, progress = trainer.reload_dataloaders_every_n_epochs, trainer.progress
    if not every:
        return False
    if sources.given.get("train") is not None and sources.given.get("val") is not None:
        warn(
            f"reload_dataloaders_every_n_epochs={every} has no effect: the loaders were passed to fit. Give the task "
            "or a data module a train_dataloader to be asked anew."
        )
    if trainer.ckpt_path is None:
        return False
    epoch = progress.epoch
    new = not progress.batch and epoch - progress.loaded >= every
    progress.epoch = epoch if new else progress.loaded
    for loader in sources.asked:
        loader.set_epoch(epoch)
    progress.epoch = epoch
    return new


def prepare_training(trainer: Trainer, task: TaskModule) -> Any:
    """Put the model where it is trained, and make its optimizers and schedulers; returns the model as it is wrapped."""
    accelerator = trainer.accelerator
    _check_steps(task)
    model = wrap(trainer, task)
    try:
        optimizers, schedulers = configure(task)  # now that the parameters are where and what they will be
    except (ValueError, TypeError, OverflowError) as error:
        if "inf" in str(error) and trainer.estimated_stepping_batches == inf:
            error.add_note(_why_endless(trainer))
        raise
    for config in schedulers:
        if (name := endless(config.scheduler)) is not None:
            raise ValueError(
                f"{type(config.scheduler).__name__}({name}=inf) would never change the learning rate; "
                + _why_endless(trainer)
            )
    check_same_optimizers(task, optimizers, schedulers, accelerator.world)
    trainer.lr_scheduler_configs = schedulers
    for optimizer in optimizers:
        accelerator.prepare_optimizer(optimizer)
    for config in schedulers:
        accelerator.add_scheduler(config.scheduler)
    accelerator.agree_on_steps(finite=trainer.on_nonfinite != "ignore", at_once=trainer.on_nonfinite == "skip")
    return model


def _why_endless(trainer: Trainer) -> str:
    why = "the training loader has no length" if trainer.max_epochs != -1 else "max_epochs=-1"
    return f"trainer.estimated_stepping_batches is infinite, as {why} and max_steps={trainer.max_steps}: set max_steps."


def wrap(trainer: Trainer, task: TaskModule) -> Any:
    """The task as the strategy wraps it, anew if other parameters are trained than before. All processes must ask."""
    by_hand = not task.automatic_optimization
    return trainer.accelerator.prepare_model(task, step="training_step", by_hand=by_hand, by_parts=True)


def _check_steps(task: TaskModule) -> None:
    name = type(task).__name__
    if type(task).training_step is TaskModule.training_step:
        raise ValueError(f"{name} needs a training_step that returns the loss.")
    own = "configure_optimizers" in vars(task)  # a configuration's, which takes the place of the class's
    if not own and type(task).configure_optimizers is TaskModule.configure_optimizers:
        raise ValueError(
            f"{name} needs a configure_optimizers that returns an optimizer, or None to train without one."
        )


def configure(task: TaskModule) -> tuple[list[torch.optim.Optimizer], list[SchedulerConfig]]:
    optimizers, schedulers = parse_optimizers(task.configure_optimizers())
    check_ownership(task, optimizers, schedulers)
    if len(optimizers) > 1 and task.automatic_optimization:
        raise ValueError(
            f"{type(task).__name__}.configure_optimizers returned {len(optimizers)} optimizers; automatic optimization "
            "steps one. Put their parameters into groups of one optimizer, or set self.automatic_optimization = False "
            "and step them in training_step."
        )
    if not (optimizers or task.automatic_optimization):
        raise ValueError(f"{type(task).__name__}.configure_optimizers returned no optimizer for training_step to step.")
    return optimizers, schedulers


def _check_validation(trainer: Trainer, task: TaskModule, sources: Sources) -> None:
    """Say so if half of what validation needs is there."""
    loaders = sources.evaluation("val")
    has_step = type(task).validation_step is not TaskModule.validation_step
    if loaders and not has_step:
        warn(f"there is a validation loader, but {type(task).__name__} has no validation_step: nothing is validated.")
    if has_step:
        sources.warn_of_empty_validation()
    if has_step and not loaders and trainer.limit_val_batches:
        warn(f"{type(task).__name__} has a validation_step, but there is no validation loader: nothing is validated.")


def _warn_of_evaluation_mode(task: TaskModule) -> None:
    """Modes are left as the user set them, so that a frozen part stays in evaluation mode; but say so."""
    parts = [(name, part) for name, part in task.named_modules() if not (part.training or _is_frozen(part))]
    names = [name or type(task).__name__ for name, part in parts]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warn(
            f"{', '.join(names[:3])}{more} will be trained in evaluation mode (no dropout, fixed batch norm), as you "
            "left it. If that is not wanted, call train() on it before fit."
        )


def _is_frozen(part: torch.nn.Module) -> bool:
    own = list(part.parameters())
    return bool(own) and not any(parameter.requires_grad for parameter in own)


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
        loader.set_epoch(0)
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
    try:
        for loader in loaders:
            if steps >= 0:
                loader.limit = steps if loader.limit is None else min(steps, loader.limit)
        with trainer.history.spending("validation"):
            EvaluationLoop(trainer, trainer.task, trainer.hooks, loaders, "validate", within_fit=True).run()
    finally:
        for loader, limit in zip(loaders, full, strict=True):
            loader.limit = limit
