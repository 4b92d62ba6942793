"""Training loop, with its hooks in the order in which they are called.

    setup; on_fit_start; [restore]
    on_sanity_check_start; a few validation batches; on_sanity_check_end
    on_train_start
    for each epoch:
        [train_dataloader again, every reload_dataloaders_every_n_epochs]
        on_train_epoch_start
        for group in loader.groups():                # one group is one optimizer step
            for micro_batch in group:
                on_train_batch_start
                with accelerator.accumulate(model):  # gradients are reduced on the group's last micro-batch only
                    loss = training_step(micro_batch)
                    on_before_backward; accelerator.backward(loss); on_after_backward
                after the group's last one:
                    agree over all processes: finite? stop?
                    on_before_optimizer_step; clip; optimizer.step()
                    on_before_zero_grad; optimizer.zero_grad()
                    schedulers by step               # only if the optimizer really stepped
                on_train_batch_end
            every log_every_n_steps: reduce what was logged, write it
            validation, if due:
                [val_dataloader again, every reload_dataloaders_every_n_epochs]
                on_validation_start; on_validation_epoch_start
                for each batch: on_validation_batch_start; validation_step; on_validation_batch_end
                on_validation_epoch_end; on_validation_end
            after the epoch's last group: schedulers by epoch
            plateau schedulers by step               # with this step's validation
            on_step_end                              # checkpoints: of this step, with this step's validation
        on_train_epoch_end
    on_train_end; on_fit_end; teardown

test and predict have the same form as the validation (on_test_start, on_test_end, on_test_epoch_start,
on_test_epoch_end, on_test_batch_start, on_test_batch_end; on_predict_start, on_predict_end, on_predict_epoch_start,
on_predict_epoch_end, on_predict_batch_start, on_predict_batch_end). on_save_checkpoint and on_load_checkpoint run when
a checkpoint is saved or restored; on_exception runs before teardown if an error was raised.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ...callbacks import AgreedInterval, read_learning_rates
from ...common.messages import format_count, warn
from ...engine import Loader, isolated_random_state, set_random_state
from ...strategies.distributed import name_phase
from ..core import SchedulerConfig, TaskModule
from ..profiling import measured_in
from .automatic import Steps
from .closure import ClosureSteps, check_closure, needs_closure
from .dataloaders import explain_empty
from .hook_table import Hooks
from .lr_schedulers import Schedules
from .manual import ManualSteps
from .preemption import save_and_leave
from .progress import Phase

if TYPE_CHECKING:
    from ..trainer import Trainer


class FitLoop:
    """Training loop of a task, created once per ``fit``."""

    def __init__(
        self,
        trainer: Trainer,
        task: TaskModule,
        model: Any,
        hooks: Hooks,
        loader: Loader,
        schedulers: list[SchedulerConfig],
        validate: Callable[[], None],
    ) -> None:
        self.trainer = trainer
        self.hooks = hooks
        self.loader = loader
        self.validate = validate
        self.progress = trainer.progress
        self.metrics = trainer.metrics
        self.agreement = trainer.accelerator.accumulation.agreement
        # With CUDA graphs, a replay overwrites the losses of earlier steps, and reading those is an error.
        self.agreement.keep_losses(1 if trainer.metrics.copies else 64)
        self.alone = trainer.accelerator.num_processes == 1
        self.schedules = Schedules(trainer, task, schedulers if task.automatic_optimization else [])
        self.schedules.attach(hooks)
        kind = choose_steps(trainer, task)
        self.steps = trainer.steps = kind(trainer, task, model, hooks, self.schedules, self._wants_to_stop)
        self.take = measured_in(trainer, "step", self.steps.take)
        self.deadline: float | None = None
        self.total = loader.length
        self.started = 0.0
        self.validation_every = self._compute_validation_interval()
        self.clock: AgreedInterval | None = None
        if trainer.val_check_seconds is not None and trainer.has_validation:
            self.clock = AgreedInterval(timedelta(seconds=trainer.val_check_seconds))

    # -- epochs --------------------------------------------------------------------------------------------------

    def run(self, random_state: Any = None) -> None:
        """Train until a limit is reached or a stop is requested.

        ``random_state`` is the RNG state of a resumed run; None keeps the current state of the process.
        """
        trainer, progress = self.trainer, self.progress
        self.started = time.monotonic() - progress.seconds
        if trainer.max_seconds is not None:
            self.deadline = self.started + trainer.max_seconds
        if self.clock is not None:
            self.clock.restart(progress.step)
        self.metrics.between_batches(True)
        for hook in self.hooks.on_train_start:
            hook()
        self.metrics.between_batches(False)
        if random_state is not None:
            set_random_state(random_state)
        if not trainer.limit_train_batches:
            warn("limit_train_batches=0, so nothing is trained.")
        elif progress.step and not progress.step_is_unfinished and (self._is_complete() or self._is_late()):
            spent = f"{progress.seconds:.0f} s (max_time={trainer.max_seconds:.0f} s), " if self._is_late() else ""
            done = (
                f"{format_count(progress.step, 'optimizer step')} and {format_count(progress.epoch, 'epoch')} are done"
            )
            warn(
                f"nothing is left to train: {spent}{done}, with max_steps={trainer.max_steps} and "
                f"max_epochs={trainer.max_epochs} (-1 means unlimited). Raise the limit to continue."
            )
        with trainer.history.spending("training"):
            trainer.history.begin(progress, read_learning_rates(trainer))
            while progress.step_is_unfinished or not (self._is_complete() or self._agree_to_stop()):
                self._epoch()
        progress.seconds = time.monotonic() - self.started
        with trainer.logging_to(None):  # the last values are written
            for hook in self.hooks.on_train_end:
                hook()

    def _is_complete(self) -> bool:
        trainer, progress = self.trainer, self.progress
        has_reached = 0 <= trainer.max_epochs <= progress.epoch or 0 <= trainer.max_steps <= progress.step
        return has_reached or not trainer.limit_train_batches

    def _agree_to_stop(self) -> bool:
        """Return whether to stop, as agreed by all ranks between two steps. After a signal, save and end the run."""
        stop = self._may_stop(self.agreement.ask(self._wants_to_stop()))
        if self.agreement.signaled and not stop:
            save_and_leave(self.trainer)
        return stop

    def _may_stop(self, requested: bool) -> bool:
        trainer, progress = self.trainer, self.progress
        return requested and progress.epoch >= trainer.min_epochs and progress.step >= (trainer.min_steps or 0)

    @name_phase("training", loop=True)
    def _epoch(self) -> None:
        """Train one epoch, or the rest of a resumed one."""
        trainer, progress, metrics, hooks = self.trainer, self.progress, self.metrics, self.hooks
        self.steps.ends_epoch, self.steps.missing_losses, first_batch = False, 0, progress.batch
        if 0 < trainer.reload_dataloaders_every_n_epochs <= progress.epoch - progress.loaded:
            self._reload()
        self.loader.tell_epoch()  # before the hooks, because epochs may differ in length
        if isinstance(trainer.val_check_interval, float):
            self.total = self.loader.length
            self.validation_every = self._compute_validation_interval()
        metrics.between_batches(True)
        # In a resumed epoch, the hooks have already drawn their random numbers.
        with isolated_random_state() if progress.batch else nullcontext():
            for hook in hooks.on_train_epoch_start:
                hook()
        metrics.between_batches(False)
        groups = self._iterate_groups()
        if progress.step_is_unfinished:  # a resume starts here, with the validation that is due
            groups = itertools.chain(((),), groups)
        for group in groups:
            if progress.phase is Phase.EPOCH_TRAINED:
                warn(
                    f"{type(self.loader.source).__name__} yields more batches than its length of {self.total:,}, "
                    "and the rest is ignored. Correct the length, or set limit_train_batches to a lower number."
                )
                break
            self.take(group)
            if self._end_of_step():
                break
        else:
            if not progress.batch:
                why = explain_empty(self.loader, trainer.world_size)
                raise ValueError(f"the training dataloader yielded no batch. {why}")
            if not progress.epoch_is_trained:  # the end of a dataloader without a length is known only here
                self._close_epoch()
        self.steps.read_outcome()  # a limit ended the run within the epoch
        if self.steps.missing_losses and self.steps.missing_losses == progress.batch - first_batch:
            warn(
                f"training_step returned None for all {format_count(self.steps.missing_losses, 'batch')} of epoch "
                f"{progress.epoch}, so nothing was trained. Return the loss. To compute gradients yourself, set "
                "self.automatic_optimization = False in __init__."
            )
        if self.steps.ends_epoch:  # without a validation, but the epoch has ended
            self.schedules.after_epoch()
        if self.steps.ends_epoch or progress.epoch_is_trained:
            self.loader.end_epoch()
            progress.end_epoch(refused=self.steps.ends_epoch)
        metrics.between_batches(True)
        trainer.update_train_epoch_values()
        if progress.epoch_is_over:
            newer = trainer.logbook.latest_validation.just_measured(trainer)
            trainer.logbook.keep_step_values(metrics, newer)  # before a callback saves them
        for hook in hooks.on_train_epoch_end:
            hook()
        trainer.logbook.write_epoch(progress.step, progress.epoch)
        metrics.between_batches(False)
        if progress.epoch_is_over:  # otherwise a limit ended the run within the epoch, which a resumed run continues
            metrics.reset()
            progress.next_epoch()

    def _reload(self) -> None:
        sources = self.trainer.sources
        self.progress.loaded, sources.outdated = self.progress.epoch, False
        sources.reload("train", self.progress.epoch)
        self.loader = sources.train
        self.total = self.loader.length
        self.validation_every = self._compute_validation_interval()

    def _reload_validation(self) -> None:
        """Create new validation dataloaders if they are due for this validation epoch."""
        sources, progress, every = self.trainer.sources, self.progress, self.trainer.reload_dataloaders_every_n_epochs
        is_due = progress.val_loaded < 0 or progress.epoch - progress.val_loaded >= every
        if every and is_due and self.trainer.limit_val_batches:
            progress.val_loaded = progress.epoch
            sources.reload("val", progress.epoch)
            sources.warn_of_empty_validation()
            self.validation_every = self._compute_validation_interval()

    def _wants_to_stop(self) -> bool:
        return bool(self.trainer.stop_requests) or self._is_late()

    def _is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    # -- between two steps ---------------------------------------------------------------------------------------

    @name_phase("training", loop=True)
    def _end_of_step(self) -> bool:
        """Log, validate, step the schedulers and save between two steps. Return whether to end the epoch early."""
        trainer, progress = self.trainer, self.progress
        if self.steps.ends_epoch:
            return True
        if self.deadline is not None:
            progress.seconds = time.monotonic() - self.started  # for checkpoints saved from here on
        stepped, progress.phase = progress.phase is Phase.STEP_TAKEN, Phase.ENDING_STEP
        write = stepped and trainer.log_every_n_steps and progress.step % trainer.log_every_n_steps == 0
        if write:
            trainer.logbook.write_step(self.metrics, progress.step, progress.epoch)
        stop = self._wants_to_stop() if self.alone else self.agreement.stop
        if self.agreement.signaled and not self._may_stop(stop):  # a run that stops is not resumed
            save_and_leave(trainer)
        if progress.batch == self.total:
            self._close_epoch()
            stop = False  # the epoch is over anyway
        else:
            if self.clock is not None:
                due = self.clock.is_over(trainer)
            else:
                due = self.validation_every is not None and self._has_passed(self.validation_every)
            if due:
                self._validate()
                self._agree_to_stop()
                stop = self.agreement.stop
            progress.phase = Phase.BETWEEN_STEPS
        if write:
            trainer.history.measure(progress, read_learning_rates(trainer))
        for hook in self.hooks.on_step_end:
            hook()
        # A request that min_epochs or min_steps held back may have been withdrawn since the ranks voted.
        if stop and self._may_stop(stop) and self._agree_to_stop():
            trainer.should_stop = True
            return True
        return 0 <= trainer.max_steps <= progress.step

    # -- validation and schedulers -------------------------------------------------------------------------------

    def _iterate_groups(self) -> Iterator[Iterable[Any]]:
        if self.trainer.sources.outdated:
            self._reload()
            self.loader.tell_epoch()
        groups = self.loader.groups()
        for group in itertools.islice(groups, 1):
            self.total = self.loader.length  # only the first batch of a stream shows whether it is sharded
            yield group
        yield from groups

    def _compute_validation_interval(self) -> int | None:
        """Return the interval between validations in micro-batches; None if micro-batches do not determine it."""
        trainer = self.trainer
        interval, total = trainer.val_check_interval, self.total
        if not trainer.has_validation:
            return None
        if isinstance(interval, int):
            if trainer.check_val_every_n_epoch is not None and total is not None and interval > total:
                raise ValueError(
                    f"val_check_interval={interval} is more than the {format_count(total, 'batch')} of an epoch, so "
                    f"validation would never run. Pass at most {total}, or pass check_val_every_n_epoch=None to count "
                    "across epochs."
                )
            if trainer.check_val_every_n_epoch is None and trainer.accelerator.step_micro_batches is not None:
                raise ValueError(
                    f"val_check_interval={interval} with check_val_every_n_epoch=None counts the batches of a process "
                    "across epochs, which depends on the number of processes, unlike step_micro_batches. Set "
                    "check_val_every_n_epoch=1, or val_check_interval to a fraction of an epoch."
                )
            return self.loader.count_own(interval)
        if interval == 1.0:
            return None
        if total is None:
            raise ValueError(
                f"val_check_interval={interval} is a fraction of an epoch, but the training dataloader has no length. "
                "Pass a whole number of batches, or 1.0 for the end of the epoch."
            )
        return self.loader.count_own(max(1, int((self.loader.global_length or 0) * interval)))

    def _validate(self) -> None:
        """Validate, unless ``check_val_every_n_epoch`` excludes this epoch, and record that a validation was due."""
        if is_validation_epoch(self.trainer):
            self._reload_validation()
            if self.trainer.has_validation:
                self.validate()
        self.progress.validated = self.progress.batches

    def _is_validation_due(self) -> bool:
        if self.clock is not None:
            return self.clock.is_over(self.trainer)
        progress, every = self.progress, self.validation_every
        return progress.batches > progress.validated if every is None else self._has_passed(every)

    def _has_passed(self, every: int) -> bool:
        """Return whether a multiple of ``every`` micro-batches has been reached since a validation was last due.

        Micro-batches are counted from the start of the epoch or, with ``check_val_every_n_epoch=None``, of the run.
        """
        progress = self.progress
        begin = 0 if self.trainer.check_val_every_n_epoch is None else progress.batches - progress.batch
        return (progress.batches - begin) // every > max(0, progress.validated - begin) // every

    def _close_epoch(self) -> None:
        """Run the validation if one is due after the epoch's last step, and then step the per-epoch schedulers."""
        self.steps.read_outcome()
        if not self.trainer.has_validation and is_validation_epoch(self.trainer):
            self._reload_validation()  # dataloaders that were empty may have batches now
        if self.trainer.has_validation and self._is_validation_due():
            self._validate()
        self.schedules.after_epoch()
        self.progress.phase = Phase.EPOCH_TRAINED


def is_validation_epoch(trainer: Trainer) -> bool:
    """Return whether ``check_val_every_n_epoch`` permits a validation in the current epoch."""
    every = trainer.check_val_every_n_epoch
    return every is None or (trainer.progress.epoch + 1) % every == 0


def choose_steps(trainer: Trainer, task: TaskModule) -> type[Steps]:
    """Return the class of the loop body for a task: automatic, manual, or with a closure."""
    with_closure = next(filter(needs_closure, trainer.optimizers), None)
    if trainer.accelerator.step_micro_batches is not None:
        obstacles = {
            "automatic_optimization=False": not task.automatic_optimization,
            type(with_closure).__name__: with_closure is not None,
        }
        for obstacle in (name for name, is_set in obstacles.items() if is_set):
            raise ValueError(
                f"step_micro_batches can't be combined with {obstacle}, which may read, step or run backward passes "
                "within a step's micro-batches. Use automatic optimization with one batch per training_step and an "
                "optimizer that needs no closure, or remove step_micro_batches."
            )
    if not task.automatic_optimization:
        return ManualSteps
    if with_closure is None:
        return Steps
    check_closure(trainer, with_closure)
    return ClosureSteps
