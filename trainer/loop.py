"""The training loop.

    setup; on_fit_start; [restore]
    on_sanity_check_start; a few validation batches; on_sanity_check_end
    on_train_start
    for each epoch:
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
                on_validation_start; on_validation_epoch_start
                for each batch: on_validation_batch_start; validation_step; on_validation_batch_end
                on_validation_epoch_end; on_validation_end
            after the epoch's last group: schedulers by epoch
            on_step_end                              # checkpoints: of this step, with this step's validation
        on_train_epoch_end
    on_train_end; on_fit_end; teardown

test and predict have the validation's form (on_test_start, on_test_end, on_test_epoch_start, on_test_epoch_end,
on_test_batch_start, on_test_batch_end; on_predict_start, on_predict_end, on_predict_epoch_start, on_predict_epoch_end,
on_predict_batch_start, on_predict_batch_end). on_save_checkpoint and on_load_checkpoint run where a checkpoint is made
or restored; on_exception runs before teardown when something raised.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..callbacks.monitor import monitored_value
from ..engine import Loader, isolated_random_state, set_random_state
from ..strategies import announce
from . import summary
from .hooks import Hooks
from .optimizers import SchedulerConfig
from .task import TaskModule

if TYPE_CHECKING:
    from .trainer import Trainer


class FitLoop:
    """Trains a task; built once per ``fit``, when everything is prepared.

    Args:
        trainer: whose flags, accelerator, progress and loggers are used.
        task: the user's task.
        model: the task as the accelerator prepared it.
        hooks: who wants to be called.
        loader: the prepared training loader.
        schedulers: the task's schedulers.
        validate: runs a validation.
    """

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
        self.task = task
        self.model = model
        self.hooks = hooks
        self.loader = loader
        self.validate = validate
        self.accelerator = trainer.accelerator
        self.progress = trainer.progress
        self.metrics = trainer.metrics
        self.agreement = trainer.accelerator.agreement
        self.cursor = trainer.accelerator.cursor
        self.optimizer = trainer.accelerator.optimizers[0] if trainer.accelerator.optimizers else None
        self.step = trainer.accelerator.method(model, "training_step")
        self.takes_index = count_positional(task.training_step) > 1
        self.by_step = [s for s in schedulers if s.interval == "step"]
        self.by_epoch = [s for s in schedulers if s.interval == "epoch"]
        self.default_clip = type(task).configure_gradient_clipping is TaskModule.configure_gradient_clipping
        self.default_scheduler_step = type(task).lr_scheduler_step is TaskModule.lr_scheduler_step
        self.alone = trainer.accelerator.num_processes == 1
        self.deadline: float | None = None
        self.total = loader.length
        self.seen_step = self.progress.step
        self.started = 0.0
        self.skip_rest = False  # a hook asked to end the epoch
        self.validation_every = self._validation_interval()

    # -- epochs --------------------------------------------------------------------------------------------------

    def run(self, random_state: Any = None) -> None:
        """Train until one of the limits is reached, or someone wants to stop.

        Args:
            random_state: what to draw from, of a run that is resumed; else whatever the process has.
        """
        trainer, progress = self.trainer, self.progress
        self.started = time.monotonic() - progress.seconds
        if trainer.max_seconds is not None:
            self.deadline = self.started + trainer.max_seconds
        for hook in self.hooks.on_train_start:
            hook()
        if random_state is not None:
            set_random_state(random_state)
        while not self._finished():
            self._epoch()
        progress.seconds = time.monotonic() - self.started
        with trainer.logging_to(None):  # the last values are out
            for hook in self.hooks.on_train_end:
                hook()

    def _finished(self) -> bool:
        trainer, progress = self.trainer, self.progress
        if 0 <= trainer.max_epochs <= progress.epoch or 0 <= trainer.max_steps <= progress.step:
            return True
        return self._may_stop(trainer.accelerator.world.any(self._wants_to_stop()))

    def _may_stop(self, wanted: bool) -> bool:
        """Whether to stop now: someone wants to, as every process knows, and the minimum is reached."""
        trainer, progress = self.trainer, self.progress
        return wanted and progress.epoch >= trainer.min_epochs and progress.step >= trainer.min_steps

    def _epoch(self) -> None:
        trainer, progress, metrics, hooks = self.trainer, self.progress, self.metrics, self.hooks
        self.skip_rest = False
        if not progress.batch and trainer.check_val_every_n_epoch is not None:
            progress.validated = progress.batches
        metrics.between_batches(True)
        metrics.weight = 1.0  # a process's value, not a batch's
        # Of an epoch that is resumed the hooks have drawn their random numbers once already.
        with isolated_random_state() if progress.batch else nullcontext():
            for hook in hooks.on_train_epoch_start:
                hook()
        metrics.between_batches(False)
        groups = self.loader.groups()
        if progress.unended:  # the last step is taken, but its end is still to come, its validation first of all
            progress.unended, groups = False, itertools.chain(((),), groups)
        for group in groups:
            self._step(group)
            if self._end_of_step():
                break
        else:
            if not progress.batch:
                raise ValueError(f"the training loader yielded no batch. {self._why_empty()}")
            if not progress.closed:  # a loader without a length ends only when it ends
                self._close_epoch()
        if self.skip_rest or progress.closed:
            self.loader.end_epoch()
            progress.closing = True  # a checkpoint from here goes on with the next epoch
        metrics.between_batches(True)
        metrics.weight = 1.0  # a process's value, not a batch's
        trainer.update_train_epoch_values()
        if progress.closing:
            trainer.logbook.keep_step_values(metrics)  # before anyone saves
        for hook in hooks.on_train_epoch_end:
            hook()
        trainer.logbook.write_epoch(progress.step, progress.epoch)
        metrics.between_batches(False)
        if progress.closing:  # else a limit ended the run within the epoch, and a checkpoint may go on with it
            metrics.reset()
            progress.next_epoch()

    def _why_empty(self) -> str:
        return summary.explain_empty(self.loader, self.trainer.world_size)

    # -- one optimizer step --------------------------------------------------------------------------------------

    def _step(self, group: Iterable[Any]) -> None:
        """Work through one group of micro-batches."""
        accelerator, hooks, progress, cursor = self.accelerator, self.hooks, self.progress, self.cursor
        for batch in group:
            index = progress.batch
            micro = cursor.micro
            last = micro.last  # type: ignore[union-attr]
            self.metrics.weight = micro.samples  # type: ignore[union-attr]
            for hook in hooks.on_train_batch_start:
                if hook(batch, index) == -1:
                    self.skip_rest = True
            if self.skip_rest:
                accelerator.drop_gradients()  # of the group's micro-batches before
                return
            with accelerator.accumulate(self.model):
                output = self.step(batch, index) if self.takes_index else self.step(batch)
                weight = None
                if isinstance(output, Tensor):
                    loss = output
                else:
                    loss, weight = self._loss_in(output)
                if loss.ndim or not loss.requires_grad:
                    _check_loss(loss)
                for hook in hooks.on_before_backward:
                    hook(loss)
                self.agreement.watch(loss)
                if last and not self.alone:
                    self.agreement.stop_vote = self._wants_to_stop()
                accelerator.backward(loss, weight=weight)
                for hook in hooks.on_after_backward:
                    hook()
            progress.batch = index + 1
            progress.batches += 1
            if last:
                self._optimize()
                progress.samples += micro.group_samples  # type: ignore[union-attr]
            if hooks.on_train_batch_end:
                outputs = _outputs(output, loss)
                for hook in hooks.on_train_batch_end:
                    hook(outputs, batch, index)

    def _wants_to_stop(self) -> bool:
        return self.trainer.should_stop or (self.deadline is not None and time.monotonic() >= self.deadline)

    def _optimize(self) -> None:
        """Agree, clip, step, zero; then the schedulers by step."""
        accelerator, optimizer, progress, hooks = self.accelerator, self.optimizer, self.progress, self.hooks
        if accelerator.always_agree or accelerator.unfinished:
            accelerator.agree()
        if not self.agreement.finite:
            self._refuse()
            return
        if optimizer is None:
            progress.step += 1
            return
        for hook in hooks.on_before_optimizer_step:
            hook(optimizer.optimizer)
        trainer = self.trainer
        if trainer.gradient_clip_val is not None or not self.default_clip:
            accelerator.unscale_gradients()
            self.task.configure_gradient_clipping(
                optimizer.optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            )
        optimizer.step()
        for hook in hooks.on_before_zero_grad:
            hook(optimizer.optimizer)
        optimizer.zero_grad()
        if accelerator.optimizer_step_was_skipped:
            progress.skipped += 1
            return
        progress.step += 1
        if self.by_step:
            self._step_schedulers(self.by_step, progress.step)

    def _refuse(self) -> None:
        """The loss is not finite on some process; every process comes here after the same step.

        Raises:
            ValueError: where the flag says ``"raise"``; names the step and the processes.
        """
        ranks = self.accelerator.not_finite_on()
        step, epoch, batch = self.progress.step + 1, self.progress.epoch, self.progress.batch - 1
        what = f"the loss is not finite on rank {', '.join(map(str, ranks))}"
        where = f"optimizer step {step} (epoch {epoch}, micro-batch {batch})"
        if self.trainer.on_nonfinite == "raise":
            raise ValueError(
                f"{what} in {where}. Look at that batch, lower the learning rate or clip the gradients; "
                "Trainer(on_nonfinite='skip') leaves such steps out."
            )
        announce(f"{what}: {where} is skipped")
        self.progress.skipped += 1
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def _end_of_step(self) -> bool:
        """The one place between two steps: log, validate, schedule, save. Returns whether the epoch ends here."""
        trainer, progress = self.trainer, self.progress
        if self.skip_rest:
            return True
        if self.deadline is not None:
            progress.seconds = time.monotonic() - self.started  # for checkpoints made from here
        stepped, self.seen_step = progress.step != self.seen_step, progress.step
        if stepped and trainer.log_every_n_steps and progress.step % trainer.log_every_n_steps == 0:
            trainer.logbook.write_step(self.metrics, progress.step, progress.epoch)
        stop = self._wants_to_stop() if self.alone else self.agreement.stop
        if progress.batch == self.total:
            self._close_epoch()
            stop = False  # the epoch is over anyway
        elif self.validation_every is not None and progress.batches - progress.validated >= self.validation_every:
            self._validate()
            stop = trainer.accelerator.world.any(trainer.should_stop)
        for hook in self.hooks.on_step_end:
            hook()
        if stop:
            trainer.should_stop = True
        return (stop and self._may_stop(stop)) or 0 <= trainer.max_steps <= progress.step

    # -- validation and schedulers -------------------------------------------------------------------------------

    def _validation_interval(self) -> int | None:
        """Micro-batches between validations within an epoch; None for at its end only."""
        trainer = self.trainer
        interval, total = self.trainer.val_check_interval, self.total
        if not trainer.has_validation:
            return None
        if isinstance(interval, int):
            if trainer.check_val_every_n_epoch is not None and total is not None and interval > total:
                raise ValueError(
                    f"val_check_interval={interval} is more than the {total} batches of an epoch, so validation would "
                    "never run. Give at most that, or check_val_every_n_epoch=None to count across epochs."
                )
            return interval
        if interval == 1.0:
            return None
        if total is None:
            raise ValueError(
                f"val_check_interval={interval} is a share of an epoch, but the training loader has no length. Give a "
                "whole number of batches, or 1.0 for the end of the epoch."
            )
        return max(1, int(total * interval))

    def _validation_epoch(self) -> bool:
        every = self.trainer.check_val_every_n_epoch
        return every is None or (self.progress.epoch + 1) % every == 0

    def _validate(self) -> None:
        self.progress.validated = self.progress.batches
        if self._validation_epoch():
            self.validate()

    def _close_epoch(self) -> None:
        """After the epoch's last step: validate if due, then the schedulers by epoch."""
        due = self.validation_every
        since = self.progress.batches - self.progress.validated
        if self.trainer.has_validation and (since > 0 if due is None else since >= due):
            self._validate()
        if any(config.reduce_on_plateau for config in self.by_epoch):
            self.trainer.update_train_epoch_values()  # one may be what a scheduler looks at
        if self.by_epoch:
            self._step_schedulers(self.by_epoch, self.progress.epoch + 1)
        self.progress.closed = True

    def _step_schedulers(self, schedulers: list[SchedulerConfig], count: int) -> None:
        for config in schedulers:
            if config.frequency != 1 and count % config.frequency:
                continue
            metric = self._monitored(config) if config.reduce_on_plateau else None
            if config.reduce_on_plateau and metric is None:
                continue
            if not self.default_scheduler_step:
                self.task.lr_scheduler_step(config.scheduler, metric)
            elif metric is None:
                config.scheduler.step()
            else:
                config.scheduler.step(metric)

    def _monitored(self, config: SchedulerConfig) -> float | None:
        return monitored_value(self.trainer, config.monitor or "", "the scheduler's monitor", config.strict)

    # -- what a step returned ------------------------------------------------------------------------------------

    def _loss_in(self, output: Any) -> tuple[Tensor, Any]:
        if isinstance(output, Mapping):
            loss = output.get("loss")
            if isinstance(loss, Tensor):
                weight = output.get("weight")
                if weight is not None:
                    _check_weight(weight)
                return loss, weight
            raise ValueError(
                f"training_step returned a dict whose 'loss' is {loss!r}; its keys are {', '.join(map(str, output))}. "
                "Put the loss, a tensor with a gradient, under 'loss'."
            )
        if output is None:
            raise ValueError(
                "training_step returned None, so there is no loss to train on. Return the loss; to leave a batch out, "
                "return {'loss': loss, 'weight': 0.0}."
            )
        raise TypeError(
            f"training_step returned a {type(output).__name__}; it must return the loss, a tensor, or a dict with it."
        )


def _check_weight(weight: Any) -> None:
    number = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight < float("inf")
    if not number and not (isinstance(weight, Tensor) and weight.numel() == 1):
        what = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
        raise ValueError(
            f"training_step returned the weight {what}; it must be one number of at least 0: what the loss is a mean "
            "over, such as the batch's number of tokens."
        )


def _check_loss(loss: Tensor) -> None:
    if loss.numel() != 1:
        raise ValueError(
            f"training_step returned a loss of shape {tuple(loss.shape)}; it must be one number: return its mean()."
        )
    if loss.requires_grad:
        return
    raise ValueError(
        f"training_step returned a loss without a gradient (shape {tuple(loss.shape)}, requires_grad=False). Compute "
        "it from the model's output, without detach(), item() or torch.no_grad(), and leave some parameter trainable."
    )


def _outputs(output: Any, loss: Tensor) -> dict[str, Any]:
    rest = output if isinstance(output, Mapping) else {}
    return {**rest, "loss": loss.detach()}


def count_positional(step: Callable[..., Any]) -> int:
    """How many positional arguments a bound step takes; 99 for any number."""
    parameters = inspect.signature(step).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 99
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
