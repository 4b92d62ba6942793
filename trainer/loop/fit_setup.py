"""Setup and run of ``fit``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from ...common.messages import abbreviate, closest_name, warn
from ...engine import isolated_random_state, list_unused
from ..checkpointing import LastStep, explain_need_of_all_ranks
from ..core import (
    SchedulerConfig,
    TaskModule,
    check_disjoint,
    check_limits,
    check_ownership,
    endless,
    overrides,
    parse_optimizers,
)
from ..logging import LatestValidation
from ..preflight import check_monitors, check_optimizers_match, check_storable, warn_of_untrained
from ..profiling import measured_in
from .dataloaders import LOADER_NAMES, Sources
from .evaluation_loop import EvaluationLoop
from .fit_loop import FitLoop, is_validation_epoch
from .hook_table import Hooks
from .run_summary import announce_start

if TYPE_CHECKING:
    from ..trainer import Trainer


class Fit:
    """Training of a task: the setup before the first step, then the loop.

    Args:
        trainer: Trainer that runs the stage.
        schedule: Source of learning rates after a resume; see `Accelerator.load_state`.
    """

    task: TaskModule
    hooks: Hooks
    sources: Sources

    def __init__(self, trainer: Trainer, schedule: str | None) -> None:
        self.trainer, self.schedule = trainer, schedule

    @contextmanager
    def work(self, task: TaskModule, hooks: Hooks, sources: Sources) -> Iterator[Callable[[], None]]:
        """Prepare the run, restore the checkpoint to resume from, if any, and yield the function that trains.

        Args:
            task: The user's task.
            hooks: The overridden hooks.
            sources: Dataloaders for training and validation.
        """
        self.task, self.hooks, self.sources = task, hooks, sources
        trainer = self.trainer
        if trainer.ckpt_path is None:
            trainer.progress.restart_epoch()
            trainer.progress.seconds = 0.0
            trainer.logbook.latest_validation = LatestValidation()
            trainer.progress.loaded = epoch = trainer.progress.epoch
            trainer.progress.val_loaded = epoch if is_validation_epoch(trainer) else -1
            trainer.metrics.reset()
        with trainer.preemption.leaving_at_once(), trainer.checkpointer.restoring_counters(trainer.opened_checkpoint):
            model, random_state = self._prepare(reloads=self._reload_dataloaders())
        loader = sources.train
        trainer.accelerator.rng.draw_apart()  # the dataloaders exist, and the sanity check restores the RNG state
        announce_start(trainer, loader)
        sanity_check = trainer.ckpt_path is None and trainer.num_sanity_val_steps and trainer.has_validation
        if sanity_check:
            self.sanity_check()
        check_monitors(trainer, trainer.logbook.epoch_names if sanity_check else None)
        _warn_of_evaluation_mode(task)
        warn_of_untrained(trainer, task)
        with trainer.logging_to(trainer.metrics):
            run_validation = measured_in(trainer, "validation", partial(validate, trainer))
            loop = FitLoop(trainer, task, model, hooks, loader, trainer.lr_scheduler_configs, run_validation)
            saves = any(callback.save_on_exception for callback in trainer.checkpoint_callbacks)
            with trainer.preemption.catching_interrupts() if saves else nullcontext():
                yield partial(measured_in(trainer, "training", loop.run), random_state)
        if idle := list_unused(task):
            warn(
                f"torch.compile had no effect on {', '.join(idle)}, because no step called "
                f"{'the module itself' if len(idle) == 1 else 'these modules themselves'}. Other methods of a module "
                f"run uncompiled. Call self.{idle[0]}(...) instead."
            )
        for hook in hooks.on_fit_end:
            hook()

    def _prepare(self, reloads: bool) -> tuple[Any, Any]:
        """Prepare the run up to the sanity check, and return the wrapped model and the RNG state of a resumed run.

        ``reloads`` is whether the epoch begins with new dataloaders, which start at their first batch.
        """
        trainer, task, sources = self.trainer, self.task, self.sources
        prepare_training(trainer, task)
        for hook in self.hooks.on_fit_start:
            hook()
        trainer.logbook.describe(task, trainer.datamodule, trainer.enable_autolog_hparams)
        model = wrap(trainer, task)  # a callback may have chosen what is trained
        loader = sources.train
        loader.set_epoch(trainer.progress.epoch)
        self._check_validation()
        trainer.checkpointer.register()
        initial_states = [
            (source, source.state_dict()) for source in (sources.hook_loaders("train") if reloads else [])
        ]
        random_state = trainer.checkpointer.restore_run(trainer.opened_checkpoint, self.schedule)
        trainer.opened_checkpoint = None  # everything is restored, so its memory can be freed
        if reloads:
            trainer.progress.loaded = trainer.progress.epoch
        for source, state in initial_states:
            source.load_state_dict(state)
        if trainer.ckpt_path is not None:
            trainer.progress.recount(loader.batches)
            trainer.logbook.call_loggers("on_resume", trainer.progress.step)
        check_storable(trainer, task)
        if any(callback.save_on_exception for callback in trainer.checkpoint_callbacks):
            if trainer.world_size > 1 and (why := explain_need_of_all_ranks(trainer)):
                warn(
                    "save_on_exception=True saves this run after Ctrl-C, but not after an error. After an error, other "
                    f"ranks may have ended, so rank zero would have to save alone, but {why}. Also set "
                    "every_n_train_steps and save_last=True."
                )
            else:
                trainer.last_step = LastStep(trainer, task)
                trainer.last_step.attach(self.hooks)
        return model, random_state

    def _reload_dataloaders(self) -> bool:
        """Create the dataloaders of a resumed run that uses ``reload_dataloaders_every_n_epochs``.

        While they are created, ``trainer.current_epoch`` is the epoch in which the earlier run created them or, if a
        reload of the training dataloader is due, the current epoch. Return whether it is due, so that the epoch begins
        with a new dataloader.
        """
        trainer, sources = self.trainer, self.sources
        every, progress = trainer.reload_dataloaders_every_n_epochs, trainer.progress
        if not every:
            return False
        if passed := [kind for kind in ("train", "val") if sources.passed_loaders.get(kind) is not None]:
            warn(
                f"reload_dataloaders_every_n_epochs={every} has no effect on the "
                f"{' and '.join(LOADER_NAMES[kind] for kind in passed)} dataloaders that were passed to fit. Define "
                f"{' and '.join(f'{kind}_dataloader' for kind in passed)} in the task or a data module instead."
            )
        if trainer.ckpt_path is None:
            return False
        epoch = progress.epoch
        reloads = not progress.batch and epoch - progress.loaded >= every
        for kind, created in (("train", epoch if reloads else progress.loaded), ("val", max(0, progress.val_loaded))):
            progress.epoch = created
            for loader in sources.hook_loaders(kind):
                loader.set_epoch(epoch)
        progress.epoch = epoch
        return reloads

    def _check_validation(self) -> None:
        task, loaders = self.task, self.sources.evaluation("val")
        name = type(task).__name__
        has_step = overrides(task, "validation_step")
        if loaders and not has_step:
            warn(
                f"fit has a validation dataloader, but {name} has no validation_step, so nothing is validated. "
                "Define validation_step."
            )
        if has_step:
            self.sources.warn_of_empty_validation()
        module = getattr(task.validation_step, "__module__", None) or ""
        is_users = not module.startswith("treadle.")  # tasks of Treadle define all steps
        if has_step and is_users and not loaders and self.trainer.limit_val_batches:
            warn(
                f"{name} has a validation_step, but fit has no validation dataloader, so nothing is validated. Pass "
                "val_dataloaders, or set limit_val_batches=0."
            )

    def sanity_check(self) -> None:
        """Validate a few batches, so that a broken validation fails early. The RNG state of training is unchanged."""
        trainer = self.trainer
        stream = trainer.accelerator.stream
        assert stream is not None
        stream_state = stream.get_state()
        trainer.sanity_checking = True
        try:
            with isolated_random_state():
                for hook in self.hooks.on_sanity_check_start:
                    hook()
                validate(trainer, trainer.num_sanity_val_steps)
                for hook in self.hooks.on_sanity_check_end:
                    hook()
        finally:
            trainer.sanity_checking = False
        stream.go_to(stream_state)
        for loader in self.sources.evaluation("val"):
            loader.set_epoch(0)
        trainer.logbook.clear()


def prepare_training(trainer: Trainer, task: TaskModule) -> Any:
    """Place the model, load its weights, build its optimizers and schedulers, and return the wrapped model.

    Raises:
        TypeError, ValueError: If the task or the result of ``configure_optimizers`` is invalid.
    """
    accelerator = trainer.accelerator
    _check_steps(task)
    model = place_and_load(trainer, task, partial(wrap, trainer, task))
    try:
        optimizers, schedulers = configure(task)  # now that the parameters have their final device and form
    except (ValueError, TypeError, OverflowError) as error:
        if "inf" in str(error) and trainer.estimated_stepping_batches == inf:
            error.add_note(_why_endless(trainer))
        raise
    for config in schedulers:
        if (name := endless(config.scheduler)) is not None:
            raise ValueError(
                f"{type(config.scheduler).__name__}({name}=inf) would never change the learning rate: "
                + _why_endless(trainer)
            )
    if isinstance(trainer.gradient_clip_val, dict):
        check_limits(task, trainer.gradient_clip_val)
    check_optimizers_match(task, optimizers, schedulers, accelerator.world)
    trainer.lr_scheduler_configs = schedulers
    for optimizer in optimizers:
        accelerator.prepare_optimizer(optimizer)
    for config in schedulers:
        accelerator.add_scheduler(config.scheduler)
    accelerator.accumulation.agree_on_steps(
        finite=trainer.on_nonfinite != "ignore", at_once=trainer.on_nonfinite == "skip"
    )
    return model


def place_and_load(trainer: Trainer, task: TaskModule, place: Callable[[], Any]) -> Any:
    """Place the model, load the weights of the stage's checkpoint, if any, and return the result of ``place``.

    ``on_load_checkpoint`` and ``load_state_dict`` may replace layers whose size only the checkpoint tells. The new ones
    are placed too, and optimizers are built afterwards.

    Args:
        trainer: Trainer of the stage.
        task: The user's task.
        place: Function that moves and wraps the task.
    """
    if (opened := trainer.opened_checkpoint) is None:
        return place()
    weights = trainer.checkpointer.call_load_hook(task, opened)
    place()
    trainer.checkpointer.load_weights(task, opened, weights)
    return place()


def _why_endless(trainer: Trainer) -> str:
    why = "the training dataloader has no length" if trainer.max_epochs != -1 else "max_epochs=-1"
    unlimited = f"{why} and max_steps={trainer.max_steps}"
    return f"trainer.estimated_stepping_batches is infinite, because {unlimited}. Set max_steps."


def wrap(trainer: Trainer, task: TaskModule) -> Any:
    """Return the task as wrapped by the strategy. Call it on all ranks.

    Args:
        trainer: Trainer of the run.
        task: The user's task.
    """
    manual = not task.automatic_optimization
    return trainer.accelerator.prepare_model(task, step="training_step", manual_optimization=manual, by_parts=True)


def _check_steps(task: TaskModule) -> None:
    name = type(task).__name__
    if type(task).training_step is TaskModule.training_step:
        own_methods = [m for m in dir(task) if callable(getattr(type(task), m, None)) and not hasattr(TaskModule, m)]
        misnamed = closest_name("training_step", own_methods, cutoff=0.7)
        advice = "Define it to return the loss." if misnamed is None else f"Rename {misnamed} to training_step."
        raise ValueError(f"{name} has no training_step. {advice}")
    if "optimizer_idx" in inspect.signature(task.training_step).parameters:
        raise ValueError(
            f"{name}.training_step has the argument optimizer_idx, but training_step is called once per batch, for all "
            "optimizers. If one loss trains them together, remove optimizer_idx. If they take turns, as in a GAN, set "
            "self.automatic_optimization = False in __init__, and step them in training_step."
        )
    is_configured = "configure_optimizers" in vars(task)  # set by a configuration, which replaces the class's
    if not is_configured and type(task).configure_optimizers is TaskModule.configure_optimizers:
        raise ValueError(
            f"{name} has no configure_optimizers. Define it to return an optimizer, or None to train without an "
            "optimizer."
        )


def configure(task: TaskModule) -> tuple[list[torch.optim.Optimizer], list[SchedulerConfig]]:
    """Call a task's ``configure_optimizers`` and return the validated optimizers and schedulers."""
    optimizers, schedulers = parse_optimizers(task.configure_optimizers())
    check_ownership(task, optimizers, schedulers)
    if task.automatic_optimization:  # otherwise training_step steps them
        check_disjoint(task, optimizers)
        for config in schedulers:
            config.check_steps()
    if not (optimizers or task.automatic_optimization):
        name = f"{type(task).__name__}.configure_optimizers"
        warn(f"{name} returned no optimizer, so each batch counts as a step, and checkpoints have no optimizer state.")
    return optimizers, schedulers


def _warn_of_evaluation_mode(task: TaskModule) -> None:
    """Warn about modules in evaluation mode that are not frozen. A task may need these modes, so they are kept."""
    # A frozen module's parts without parameters, such as a dropout, are frozen too.
    frozen = {inner for part in task.modules() if not part.training and _is_frozen(part) for inner in part.modules()}
    parts = [(name, part) for name, part in task.named_modules() if not (part.training or part in frozen)]
    if names := [name or type(task).__name__ for name, part in parts]:
        warn(
            f"{abbreviate(names, 3)} will be trained in evaluation mode (no dropout, fixed batch norm), because "
            "fit does not change the mode of a module. To train in training mode, call train() on "
            f"{'the module' if len(names) == 1 else 'these modules'} before fit."
        )


def _is_frozen(part: torch.nn.Module) -> bool:
    parameters = list(part.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def validate(trainer: Trainer, steps: float = math.inf) -> None:
    """Run a validation within ``fit``.

    ``steps`` is the maximum number of batches of each dataloader.
    """
    loaders = trainer.sources.evaluation("val")
    limits = [loader.limit for loader in loaders]
    try:
        for loader in loaders:
            if steps < math.inf:
                loader.limit = int(steps if loader.limit is None else min(steps, loader.limit))
        # A backward pass in validation_step is of this rank's own batches, whose number may differ between ranks.
        apart = nullcontext() if trainer.task.automatic_optimization else trainer.accelerator.no_sync(trainer.task)
        with trainer.history.spending("validation"), apart:
            EvaluationLoop(trainer, trainer.task, trainer.hooks, loaders, "validate", within_fit=True).run()
    finally:
        for loader, limit in zip(loaders, limits, strict=True):
            loader.limit = limit
