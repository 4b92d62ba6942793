"""Loop body for automatic optimization."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils.data import default_collate

from ...engine import isolated_random_state
from ...engine.data import Micro, batch_indices
from ...engine.metrics import MutedMetrics
from ...engine.optim import PreparedOptimizer, nonfinite
from ...strategies.distributed import name_phase
from ..core import TaskModule, overrides
from .hook_table import Hook, Hooks, count_positional, pass_by_keyword
from .lr_schedulers import Schedules
from .progress import Phase
from .step_output import check_loss, for_hooks, loss_in, warn_of_none

if TYPE_CHECKING:
    from ..trainer import Trainer


class Steps:
    """Loop body that takes one optimizer step for each group of micro-batches.

    Args:
        trainer: Trainer of the run.
        task: The user's task.
        model: The task as prepared by the accelerator.
        hooks: The overridden hooks.
        schedules: Schedulers of the task.
        wants_to_stop: Function that returns whether this process requests a stop.

    Attributes:
        ends_epoch: Whether a hook requested the end of the epoch.
        idle: An optimizer without effect that ``TaskModule.optimizers`` returns if ``configure_optimizers`` returned
            none; otherwise empty.
        missing_losses: Number of batches for which ``training_step`` returned None.
    """

    def __init__(
        self,
        trainer: Trainer,
        task: TaskModule,
        model: Any,
        hooks: Hooks,
        schedules: Schedules,
        wants_to_stop: Callable[[], bool],
    ) -> None:
        self.trainer = trainer
        self.task = task
        self.model = model
        self.hooks = hooks
        self.schedules = schedules
        self.wants_to_stop = wants_to_stop
        self.accelerator = trainer.accelerator
        self.progress = trainer.progress
        self.metrics = trainer.metrics
        self.accumulation = trainer.accelerator.accumulation
        self.agreement = self.accumulation.agreement
        self.cursor = trainer.accelerator.cursor
        self.optimizers = trainer.accelerator.optimizers
        self.idle = [] if self.optimizers else [PreparedOptimizer(SGD([torch.zeros(1)]), self.accumulation, [])]
        self.step = trainer.accelerator.method(model, "training_step")
        self.takes_index = count_positional(task.training_step) > 1
        self.custom_clip = overrides(task, "configure_gradient_clipping")
        self.clips = trainer.gradient_clip_val is not None or self.custom_clip
        self.shares_overflows = len(self.optimizers) > 1 and self.accumulation.loss_scale is not None
        self.clip_hook = pass_by_keyword(
            task.configure_gradient_clipping, "gradient_clip_val", "gradient_clip_algorithm"
        )
        self.custom_backward = task.backward if overrides(task, "backward") else None
        self.custom_step = task.optimizer_step if overrides(task, "optimizer_step") else None
        self.custom_zero_grad = task.optimizer_zero_grad if overrides(task, "optimizer_zero_grad") else None
        self.alone = trainer.accelerator.num_processes == 1
        collate = getattr(self._find_loader().source, "collate_fn", None)
        self.may_miss = not self.alone and collate is not default_collate  # which never returns None
        self.placeholder: Any = None  # the latest batch, if a later one may be None
        self.may_skip = self.alone and trainer.scaler is None and self.accumulation.sums is None
        self.ends_epoch = False
        self.missing_losses = 0
        self.bad_batches: list[str] = []  # descriptions of the step's batches whose loss is not finite

    def use(self, model: Any) -> None:
        """Use another wrapped form of the task.

        Args:
            model: Task as wrapped by the strategy.
        """
        self.model = model
        self.step = self.accelerator.method(model, "training_step")

    def close(self) -> None:
        """Release objects that the steps hold."""

    @name_phase("forward", loop=True)
    def take(self, group: Iterable[Any]) -> None:
        """Process the micro-batches of one optimizer step.

        Args:
            group: The micro-batches.
        """
        accumulation, hooks, progress, cursor = self.accumulation, self.hooks, self.progress, self.cursor
        first_step = progress.step
        batches = iter(group if self.alone else self.metrics.counted(group, cursor, self.task))
        for batch in batches:
            progress.phase = Phase.IN_STEP
            index = progress.batch
            micro = cursor.micro
            last = micro.last  # type: ignore[union-attr]
            if batch is None:
                self._take_none(micro, index)  # type: ignore[arg-type]
                continue
            if self.may_miss:
                self.placeholder = batch
            self.metrics.weight = micro.samples  # type: ignore[union-attr]
            for hook in hooks.on_train_batch_start:
                if hook(batch, index) == -1:
                    self.ends_epoch = True
            if self.ends_epoch:
                self._leave_epoch(batch, batches, index)
                return
            if not torch.is_grad_enabled():  # the dataset or a hook left a generator suspended within no_grad
                torch.set_grad_enabled(True)
            with accumulation.accumulate(self.model):
                output = self.step(batch, index) if self.takes_index else self.step(batch)
                weight = None
                if isinstance(output, Tensor):
                    loss = output
                else:
                    loss, weight = loss_in(output, self.may_skip)
                    self.missing_losses += output is None
                if loss.ndim or not loss.requires_grad:
                    check_loss(loss)
                for hook in hooks.on_before_backward:
                    hook(loss)
                if not self.agreement.record_loss(loss):
                    self.note_batch(batch)
                if last and not self.alone:
                    self.agreement.stop_vote = self.wants_to_stop()
                accumulation.backward(loss, weight=weight, by=self.custom_backward)
                for hook in hooks.on_after_backward:
                    hook()
            progress.batch = index + 1
            progress.batches += 1
            if last:
                self._optimize(index, loss, batch)
                progress.samples += micro.group_samples  # type: ignore[union-attr]
                progress.phase = Phase.STEP_TAKEN if progress.step > first_step else Phase.ENDING_STEP
            if hooks.on_train_batch_end:
                outputs = for_hooks(output)
                for hook in hooks.on_train_batch_end:
                    hook(outputs, batch, index)

    def _leave_epoch(self, batch: Any, batches: Iterator[Any], index: int) -> None:
        """End the epoch, without the step of this group's micro-batches."""
        if not self.alone:
            self._leave_together(itertools.chain((batch,), batches), index)
        self.accumulation.drop_gradients()
        self.bad_batches.clear()
        self.progress.phase = Phase.BETWEEN_STEPS

    def _take_none(self, micro: Micro, index: int) -> None:
        """Process a micro-batch that is None: it contributes nothing, and its samples are left out of the step's mean.

        With several processes, other ranks may have a batch, so this rank takes part with weight zero.
        """
        progress, accumulation = self.progress, self.accumulation
        if accumulation.sums is not None:
            raise ValueError(
                f"batch {index} is None, but with step_micro_batches each micro-batch has its place in a fixed sum. "
                "Let collate_fn return at least one sample, or remove step_micro_batches."
            )
        warn_of_none(self.accelerator.process_index)
        accumulation.missing += micro.samples
        if self.alone:
            with accumulation.accumulate(self.model):
                pass
        else:
            self._run_placeholder(micro, index)
        progress.batch, progress.batches = index + 1, progress.batches + 1
        if micro.last:
            first_step = progress.step
            self._optimize(index, torch.zeros(()), None)
            progress.samples += micro.group_samples
            progress.phase = Phase.STEP_TAKEN if progress.step > first_step else Phase.ENDING_STEP
        for hook in self.hooks.on_train_batch_end:
            hook(None, None, index)

    def _run_placeholder(self, micro: Micro, index: int) -> None:
        if self.placeholder is None:
            self.placeholder = self._find_loader().read_placeholder()
        if self.placeholder is None:
            raise ValueError(
                f"batch {index} is None on rank {self.accelerator.process_index}, and no other sample can take its "
                "place, which keeps this rank in step with the others. Let collate_fn return at least one sample."
            )
        if micro.last:
            self.agreement.stop_vote = self.wants_to_stop()
        self._run_without_weight((self.placeholder,), index)
        if not self.agreement.immediate and self.accumulation.group.weight is None:
            raise ValueError(
                f"batch {index} is None on rank {self.accelerator.process_index}. On accelerators, the other ranks "
                "learn of its weight only after the step. Let collate_fn return at least one sample, or return the "
                "number of samples from training_step: {'loss': loss, 'weight': samples}."
            )

    @name_phase("optimizer step", loop=True)
    def _optimize(self, index: int, loss: Tensor, batch: Any) -> None:
        accumulation, optimizers, progress, hooks = self.accumulation, self.optimizers, self.progress, self.hooks
        self.agreement.next_place = progress.step + 1, progress.epoch, index
        if accumulation.always_agree or accumulation.watches_gradients:
            accumulation.exchange_votes()
        if self.agreement.leaves:
            self.refuse_to_leave(None)
        if accumulation.missing and not accumulation.close_gap(self.cursor.micro.group_samples):  # type: ignore[union-attr]
            return
        if not self.agreement.finite:
            self.refuse(batch=batch)
            return
        if not optimizers:
            progress.step += 1
            return
        if hooks.on_before_optimizer_step:
            accumulation.unscale_gradients()
            for optimizer in optimizers:
                for hook in hooks.on_before_optimizer_step:
                    hook(optimizer.optimizer)
        if self.clips:
            self.clip()
        if self.shares_overflows:
            accumulation.share_overflows()
        stepped = skipped = False
        for optimizer in optimizers:  # after the gradients of all are final, because they may be clipped by one norm
            steps_taken, steps_skipped = optimizer.steps_taken, optimizer.skipped
            if self.custom_step is None:
                optimizer.step()
            else:  # the gradients are computed, so the closure only returns the loss
                self.custom_step(progress.epoch, index, optimizer, loss.detach)
            stepped |= optimizer.steps_taken != steps_taken
            skipped |= optimizer.skipped != steps_skipped
        for optimizer in optimizers:
            for hook in hooks.on_before_zero_grad:
                hook(optimizer.optimizer)
            self.zero_grad(index, optimizer)
        progress.skipped += skipped
        if stepped and not skipped:
            progress.step += 1
            if self.schedules.by_step:
                self.schedules.after_step()

    def _leave_together(self, batches: Iterable[Any], index: int) -> None:
        """Check that every rank ends the epoch at this accumulation group; raise a ValueError on every rank otherwise.

        A rank that does not end the epoch is already waiting in the group's collectives, so this rank participates in
        them with weight zero.
        """
        accumulation, agreement = self.accumulation, self.agreement
        agreement.leave_vote = True
        self._run_without_weight(batches, index)
        accumulation.exchange_votes()
        agreement.read_pending()
        agreement.leave_vote = False
        if agreement.leaves < self.accelerator.num_processes:
            self.refuse_to_leave(index)
        agreement.leaves = 0

    def _run_without_weight(self, batches: Iterable[Any], index: int) -> None:
        """Run steps of which only the collectives count; buffers, metrics and the RNG state are kept."""
        accumulation, cursor, latest = self.accumulation, self.cursor, None
        buffers = [(buffer, buffer.clone()) for buffer in self.task.buffers()]
        with isolated_random_state(), self.trainer.logging_to(MutedMetrics(training=True)):
            for batch_idx, batch in enumerate(batches, index):
                latest = latest if batch is None else batch
                micro = cursor.micro
                cursor.micro = replace(micro, samples=0, scale=0.0)  # type: ignore[type-var]
                for placeholder in self.metrics.counted((latest,), cursor, self.task):
                    with accumulation.accumulate(self.model):
                        output = self.step(placeholder, batch_idx) if self.takes_index else self.step(placeholder)
                        loss, weight = (output, None) if isinstance(output, Tensor) else loss_in(output)
                        accumulation.backward(loss, weight=weight, by=self.custom_backward)
                cursor.micro = micro
        for buffer, saved in buffers:
            buffer.copy_(saved)

    def may_leave(self) -> bool:
        """Return whether one of several ranks has a hook that may return -1. Call it on all ranks, once."""
        return not self.alone and self.accelerator.world.any(any(map(_is_users, self.hooks.on_train_batch_start)))

    def vote_to_leave(self, index: int) -> None:
        """Check in a separate collective that all ranks end the epoch or none does.

        Args:
            index: Index of the micro-batch.

        Raises:
            ValueError: On every rank, if some ranks leave and others stay.
        """
        leaves = int(self.accelerator.world.all_reduce(torch.tensor(int(self.ends_epoch), device="cpu")))
        if 0 < leaves < self.accelerator.num_processes:
            self.refuse_to_leave(index if self.ends_epoch else None)

    def refuse_to_leave(self, index: int | None) -> None:
        """Raise an error, because some ranks leave the epoch and others stay.

        Args:
            index: Index of the micro-batch for which this rank's hook returned -1, or None.

        Raises:
            ValueError: Always.
        """
        world = self.accelerator.world
        # If votes are read one step late, the other ranks are already in another step.
        by_rank = dict(enumerate(world.gather_objects(index))) if self.agreement.immediate else {world.rank: index}
        leaving = [f"rank {rank} (micro-batch {batch})" for rank, batch in by_rank.items() if batch is not None]
        where = ", ".join(leaving) or "at least one rank"
        raise ValueError(
            f"on_train_batch_start returned -1 on {where} in epoch {self.progress.epoch}, but not on every "
            "rank. All ranks must end an epoch at the same step. Base the decision on a value that is the same on all "
            "ranks, such as batch_idx, global_step or a logged metric."
        )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Refuse a call of ``manual_backward``; `ManualSteps` overrides this method.

        Args:
            loss: Loss of the batch.
            args: Positional arguments of ``Tensor.backward``.
            kwargs: Keyword arguments of ``Tensor.backward``.

        Raises:
            RuntimeError: Always, because the loop runs the backward pass itself.
        """
        raise RuntimeError(
            "manual_backward requires automatic_optimization=False. Otherwise, the Trainer runs the backward pass on "
            "the loss that training_step returns. Set self.automatic_optimization = False in __init__, or remove the "
            "call."
        )

    def clip(self) -> None:
        """Clip the gradients with the task's ``configure_gradient_clipping``.

        An override is called for each optimizer. Otherwise, one norm covers the parameters of all optimizers.
        """
        trainer = self.trainer
        self.accumulation.unscale_gradients()
        optimizers: list[Any] = [prepared.optimizer for prepared in self.optimizers]
        if len(optimizers) > 1 and not self.custom_clip:
            optimizers = [optimizers]
        for optimizer in optimizers:
            self.clip_hook(optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)

    def zero_grad(self, index: int, optimizer: PreparedOptimizer) -> None:
        """Reset an optimizer's gradients, with the task's hook if it is overridden.

        Args:
            index: Index of a micro-batch of the step.
            optimizer: Optimizer as prepared by the accelerator.
        """
        if self.custom_zero_grad is None:
            optimizer.zero_grad()
        else:
            self.custom_zero_grad(self.progress.epoch, index, optimizer)

    def read_outcome(self) -> None:
        """Call `refuse` if the last step had non-finite values, which accelerators report one step late."""
        self.agreement.read_pending()
        if not self.agreement.finite:
            self.refuse()

    def note_batch(self, batch: Any) -> None:
        """Record a description of a micro-batch with a non-finite loss, before it is freed.

        Args:
            batch: The micro-batch.
        """
        text, _ = nonfinite.describe_batch(batch, batch_indices(self._find_loader()))
        self.bad_batches += [text] if text else []

    def refuse(self, optimizer: Optimizer | None = None, *, batch: Any = None) -> None:
        """Raise an error for a step with non-finite values, or skip it. Call it on all ranks.

        Args:
            optimizer: In manual optimization, the unwrapped optimizer that is about to step.
            batch: The last micro-batch of the step.

        Raises:
            ValueError: If ``on_nonfinite="raise"``.
        """
        agreement = self.agreement
        step, epoch, last = agreement.place
        first = last - max(0, agreement.micro_batches - 1)
        losses = [first + number for number in agreement.bad_losses]
        found = nonfinite.Evidence(losses, samples="; ".join(self.bad_batches))
        group = self._find_loader(), batch, last - first
        by_rank = nonfinite.collect(agreement, self.accumulation, found, *group, exchange=True)
        self.bad_batches.clear()
        agreement.forget_losses()
        findings = nonfinite.combine(by_rank, first, last)
        problem = f"{findings.problem} in optimizer step {step} (epoch {epoch}, micro-batch {findings.batches})"
        notes = "" if all(o.guarded for o in self.accelerator.optimizers) else nonfinite.SPOILED
        nonfinite.refuse_or_skip(
            self.trainer.on_nonfinite, problem, findings.samples, notes, "Trainer", findings.losses
        )
        self.leave_out(findings.losses, optimizer)

    def leave_out(self, losses: bool, optimizer: Optimizer | None = None) -> None:
        """Count a step as skipped and reset the gradients.

        Args:
            losses: Whether a loss is not finite, as opposed to only a gradient.
            optimizer: See `refuse`.
        """
        self.progress.skipped += 1
        for prepared in self.optimizers:
            prepared.optimizer.zero_grad()

    def _find_loader(self) -> Any:
        return self.trainer.sources.train


def _is_users(hook: Hook) -> bool:
    """Return whether a hook is user-defined and may therefore return -1. Hooks of Treadle's callbacks return None."""
    function = hook.func if isinstance(hook, partial) else hook
    return not str(getattr(function, "__module__", "")).startswith("treadle.")
