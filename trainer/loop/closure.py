"""Steps of optimizers that require a closure, such as L-BFGS."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...strategies.distributed import name_phase
from .automatic import Steps
from .progress import Phase
from .step_output import check_loss, for_hooks, loss_in

if TYPE_CHECKING:
    from ..trainer import Trainer


class ClosureSteps(Steps):
    """Loop body that passes a closure to the optimizer. Each closure call processes the whole group of micro-batches.

    Every process gets the same loss, so the optimizers of all ranks make the same decisions.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        (self.optimizer,) = self.optimizers
        self.voting = self.may_leave()

    @name_phase("forward", loop=True)
    def take(self, group: Iterable[Any]) -> None:
        """Process a group of micro-batches in one optimizer step.

        The hooks of the backward pass and of the optimizer run in each closure call.
        """
        hooks, progress, cursor = self.hooks, self.progress, self.cursor
        micro_batches: list[tuple[Any, Any]] = []
        for batch in group:
            progress.phase = Phase.IN_STEP
            if batch is None:
                name = type(self.optimizer.optimizer).__name__
                raise ValueError(
                    f"the training dataloader yielded None instead of a batch, but {name} evaluates the batches of a "
                    "step several times and cannot skip one. Let collate_fn return at least one sample."
                )
            micro_batches.append((batch, cursor.micro))
            self.metrics.weight = cursor.micro.samples  # type: ignore[union-attr]
            for hook in hooks.on_train_batch_start:
                if hook(batch, progress.batch + len(micro_batches) - 1) == -1:
                    self.ends_epoch = True
            if self.ends_epoch:
                break
        if not micro_batches:
            return
        if self.voting:
            self.vote_to_leave(progress.batch + len(micro_batches) - 1)
        if self.ends_epoch:
            progress.phase = Phase.BETWEEN_STEPS
            return
        first, optimizer = progress.batch, self.optimizer
        results: list[tuple[Any, Tensor]] = []

        def closure() -> Tensor:
            with torch.enable_grad():
                results[:] = self._evaluate(micro_batches, first)
            return self._compute_mean_loss(
                [(loss, micro) for (_, loss), (_, micro) in zip(results, micro_batches, strict=True)]
            )

        steps_taken, index = optimizer.steps_taken, first + len(micro_batches) - 1
        if self.custom_step is None:
            optimizer.step(closure)
        else:
            self.custom_step(progress.epoch, index, optimizer, closure)
        optimizer.optimizer.zero_grad()
        progress.batch, progress.batches = index + 1, progress.batches + len(micro_batches)
        progress.samples += micro_batches[-1][1].group_samples
        stepped = optimizer.steps_taken != steps_taken
        progress.step += stepped
        progress.phase = Phase.STEP_TAKEN if stepped else Phase.ENDING_STEP
        if self.schedules.by_step and stepped:
            self.schedules.after_step()
        for number, (output, _) in enumerate(results if hooks.on_train_batch_end else ()):
            for hook in hooks.on_train_batch_end:
                hook(for_hooks(output), micro_batches[number][0], first + number)

    def _evaluate(self, micro_batches: list[tuple[Any, Any]], first: int) -> list[tuple[Any, Tensor]]:
        """Compute the group's reduced and clipped gradients. Return each batch's step result and loss."""
        accumulation, optimizer = self.accumulation, self.optimizer
        for hook in self.hooks.on_before_zero_grad:
            hook(optimizer.optimizer)
        accumulation.sync_gradients = True  # reset: the previous group may have ended without it
        self.zero_grad(first, optimizer)
        results = []
        for number, batch in enumerate(
            self.metrics.counted(self._replay_batches(micro_batches), self.cursor, self.task)
        ):
            results.append(self._forward_and_backward(batch, first + number, micro_batches[number][1].last))
        self.agreement.next_place = self.progress.step + 1, self.progress.epoch, first + len(micro_batches) - 1
        if accumulation.always_agree or accumulation.watches_gradients:
            accumulation.exchange_votes()
        if not self.agreement.finite:
            self.refuse(batch=micro_batches[-1][0])
        for hook in self.hooks.on_before_optimizer_step:
            hook(optimizer.optimizer)
        if self.clips:
            self.clip()
        return results

    def _replay_batches(self, micro_batches: list[tuple[Any, Any]]) -> Iterator[Any]:
        for batch, micro in micro_batches:
            self.cursor.micro, self.metrics.weight = micro, micro.samples
            yield batch

    def _forward_and_backward(self, batch: Any, index: int, last: bool) -> tuple[Any, Tensor]:
        accumulation, hooks = self.accumulation, self.hooks
        with accumulation.accumulate(self.model):
            output = self.step(batch, index) if self.takes_index else self.step(batch)
            loss, weight = (output, None) if isinstance(output, Tensor) else loss_in(output)
            check_loss(loss)
            if weight is not None:
                name = type(self.optimizer.optimizer).__name__
                raise ValueError(
                    f"training_step returned a weight, but {name} steps with a closure, whose losses cannot be "
                    "weighted. Return only the loss."
                )
            for hook in hooks.on_before_backward:
                hook(loss)
            if not self.agreement.record_loss(loss):
                self.note_batch(batch)
            if last and not self.alone:
                self.agreement.stop_vote = self.wants_to_stop()
            accumulation.backward(loss, by=self.custom_backward)
            for hook in hooks.on_after_backward:
                hook()
        return output, loss

    def _compute_mean_loss(self, losses: list[tuple[Tensor, Any]]) -> Tensor:
        """Return the group's mean loss over all processes, weighted by samples like the gradient."""
        total = torch.stack([loss.detach() * micro.scale for loss, micro in losses]).sum()
        return self.accelerator.data_world.all_reduce(total, "mean")


def check_closure(trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
    """Raise a ValueError for settings that do not support an optimizer with a closure."""
    others = [type(o).__name__ for o in trainer.optimizers if o is not optimizer]
    strategy, precision = trainer.accelerator.strategy, trainer.accelerator.precision
    in_parts = strategy.sharded or strategy.keeps_apart(optimizer)
    reasons = {
        f"other optimizers ({', '.join(others)}), because it evaluates the batches of a step several times. Return it "
        "alone, or set self.automatic_optimization = False": others,
        f"strategy={strategy.name!r}, because it would see only a shard of the model. Use strategy='ddp'": in_parts,
        f"precision={precision.name!r}, whose loss scale skips steps. Use 'bf16-mixed' or '32-true'": precision.scaled,
        "on_nonfinite='skip', because it cannot skip part of a step. Use 'raise'": trainer.on_nonfinite == "skip",
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"{type(optimizer).__name__} steps with a closure and cannot run with {reason}.")


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer.step`` requires a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
