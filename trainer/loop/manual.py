"""Steps of tasks with manual optimization."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ...common.messages import warn
from ...engine.data import Micro
from ...engine.optim import PreparedOptimizer
from ..core import overrides
from .automatic import Steps
from .progress import Phase
from .step_output import for_hooks, warn_of_none

_AUTOMATIC = ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step")


class ManualSteps(Steps):
    """Loop body for tasks whose ``training_step`` steps the optimizers.

    The optimizers' counters show whether a step was taken. If ``configure_optimizers`` returns no optimizer, each batch
    counts as a step. Each process accumulates its own gradients until an optimizer's step or clipping needs them. They
    are then reduced once, which gives the same sum as a reduction after each backward pass.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        optimizers = self.accelerator.optimizers
        _refuse_flags(self.trainer)
        name = type(self.task).__name__
        if idle := [hook for hook in _AUTOMATIC if overrides(self.task, hook)]:
            hooks = ", ".join(f"{name}.{hook}" for hook in idle)
            verb = "is" if len(idle) == 1 else "are"
            warn(f"{hooks} {verb} never called with automatic_optimization=False. Move the code to training_step.")
        self.step = self._bind(self.accelerator.local_method(self.task, "training_step"))
        self.optimizers = optimizers
        self.batch: Any = None  # the batch of the current training_step
        self.votes = self.accumulation.always_agree
        self.accumulation.always_agree = False  # the ranks agree once after the step, not in each backward pass
        self.voting = self.may_leave()
        self.tainted: set[PreparedOptimizer] = set()  # the optimizers whose next step is skipped
        self.watches_gradients = self.accumulation.watches_gradients
        self.accumulation.watches_gradients = False  # checked before each optimizer's step instead
        if self.agreement.watch_finite:
            self.accumulation.guard = self._may_step
        hooked = optimizers if self.hooks.on_before_optimizer_step else []
        self._handles = [optimizer.optimizer.register_step_pre_hook(self._before_step) for optimizer in hooked]

    def close(self) -> None:
        """Remove the hooks from the optimizers, which a user may keep for another run."""
        self.accumulation.guard = None
        for handle in self._handles:
            handle.remove()

    def use(self, model: Any) -> None:
        """Replace the wrapped task; see `Steps.use`."""
        self.model = model

    def take(self, group: Iterable[Any]) -> None:
        """Process a group, which is a single batch; see `Steps.take`."""
        accumulation, hooks, progress = self.accumulation, self.hooks, self.progress
        for batch in group if self.alone else self.metrics.counted(group, self.cursor, self.task):
            progress.phase = Phase.IN_STEP
            index = progress.batch
            micro = self.cursor.micro
            if batch is None:
                self._skip_none(micro, index)
                continue
            self.metrics.weight = micro.samples  # type: ignore[union-attr]
            for hook in hooks.on_train_batch_start:
                if hook(batch, index) == -1:
                    self.skip_rest = True
            if self.voting:
                self.vote_to_leave(index)  # before training_step, which steps the optimizers
            if self.skip_rest:
                progress.phase = Phase.BETWEEN_STEPS
                return
            accumulation.sync_gradients = True
            self.agreement.next_place = progress.step + 1, progress.epoch, index
            steps_before, skipped_before = self._count_steps()
            self.batch = batch
            output = self.step(batch, index) if self.takes_index else self.step(batch)
            progress.batch, progress.batches = index + 1, progress.batches + 1
            self._agree()
            self.batch = None
            steps_after, skipped_after = self._count_steps()
            stepped = steps_after != steps_before or not self.optimizers
            progress.step += stepped
            progress.skipped += skipped_after != skipped_before and not stepped
            progress.samples += micro.group_samples  # type: ignore[union-attr]
            progress.phase = Phase.STEP_TAKEN if stepped else Phase.ENDING_STEP
            if hooks.on_train_batch_end:
                outputs = for_hooks(output)
                for hook in hooks.on_train_batch_end:
                    hook(outputs, batch, index)

    def _skip_none(self, micro: Micro, index: int) -> None:
        """Skip a batch that is None."""
        progress = self.progress
        if not self.alone:
            raise ValueError(
                f"batch {index} is None on rank {self.accelerator.process_index}, but with manual optimization, the "
                "optimizers of all ranks step together. Let collate_fn return at least one sample."
            )
        warn_of_none(self.accelerator.process_index)
        progress.batch, progress.batches = index + 1, progress.batches + 1
        progress.samples += micro.group_samples
        progress.phase = Phase.ENDING_STEP
        for hook in self.hooks.on_train_batch_end:
            hook({}, None, index)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of ``manual_backward``."""
        for hook in self.hooks.on_before_backward:
            hook(loss)
        if not self.agreement.watch(loss):
            self.note_batch(self.batch)
        self.accumulation.backward(loss, *args, by=self.custom_backward, **kwargs)
        for hook in self.hooks.on_after_backward:
            hook()

    def _count_steps(self) -> tuple[list[int], list[int]]:
        return [optimizer.steps_taken for optimizer in self.optimizers], [
            optimizer.skipped for optimizer in self.optimizers
        ]

    def _agree(self) -> None:
        """Agree across ranks, after a batch, on whether its losses are finite and whether to stop."""
        agreement = self.agreement
        if self.votes:
            agreement.stop_vote = self.wants_to_stop()
            agreement.vote(None)
            self.accumulation.agree()
        if not agreement.finite:
            self.refuse(batch=self.batch)
        agreement.micro_batches = 0

    def _may_step(self, optimizer: PreparedOptimizer) -> bool:
        """Return whether an optimizer may step, with the same result on every rank; see `Accumulation.guard`."""
        agreement, accumulation = self.agreement, self.accumulation
        if optimizer in self.tainted:  # announced after the micro-batch whose loss was not finite
            agreement.forget_losses()
            self.leave_out(False, optimizer)
            return False
        if self.watches_gradients:
            agreement.watch_gradients((optimizer,))
        if not agreement.finite_so_far(accumulation.agreed_taint):
            self.refuse(optimizer, batch=self.batch)
            return False
        return True

    def leave_out(self, losses: bool, optimizer: PreparedOptimizer | None = None) -> None:
        """Skip a step; see `Steps.leave_out`. After a loss that is not finite, every optimizer skips a step."""
        self.accumulation.agreed_taint = None
        if losses or optimizer is None:
            self.tainted.update(self.optimizers)
        if optimizer is not None:
            self.tainted.discard(optimizer)
            optimizer.optimizer.zero_grad()

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        for hook in self.hooks.on_before_optimizer_step:
            hook(optimizer)


def _refuse_flags(trainer: Any) -> None:
    """Raise a ValueError for flags that have no effect with manual optimization."""
    conflicts = {
        "gradient_clip_val": (trainer.gradient_clip_val, None, "call self.clip_gradients(optimizer, ...)"),
        "accumulate_grad_batches": (trainer.accumulate_grad_batches, 1, "accumulate gradients"),
    }
    for flag, (value, default, fix) in conflicts.items():
        if value != default:
            raise ValueError(
                f"{flag}={value} has no effect with automatic_optimization=False. Remove {flag}, and {fix} in "
                "training_step."
            )
