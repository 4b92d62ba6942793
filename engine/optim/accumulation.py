"""Gradient accumulation over the micro-batches of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...common.validation import check_int
from ...strategies import Strategy, World
from ...strategies.distributed import local
from ..configuration import GradientAccumulationPlugin
from ..data import Cursor, Micro
from ..running_loaders import get_running_loader
from .agreement import Agreement
from .loss_scaling import LossScale, divide_gradients
from .prepared_optimizer import PreparedOptimizer

_NO_CONTEXT = nullcontext()


class Accumulation:
    """Accumulator of the gradients of the micro-batches that form one optimizer step.

    Several methods implement the method of `Accelerator` with the same name. ``models`` and ``optimizers`` are lists
    that the Accelerator appends to.

    Attributes:
        sync_gradients: Whether the current micro-batch is the last of its group, after which the optimizer steps.
        optimizer_step_was_skipped: Whether the last call of an optimizer's ``step`` at the end of a group skipped the
            step. A step that is skipped on the device alone does not count, because the host does not know of it.
        groups_end_with_loader: Whether the end of a loader ends a group.
        position: Number of micro-batches in the current, unfinished group, if no prepared loader forms the groups.
        always_agree: Whether the processes exchange votes in every step; see `Agreement`.
        guard: Function that is called with the optimizer before each step and returns whether the step may be taken.
        unfinished: Whether the gradients are weighted sums that have not been divided by the total weight yet.
        manual_ids: IDs of the parameters whose gradients are reduced before optimizer steps, as in manual optimization,
            and not in backward passes.
        unreduced: The optimizers of such parameters whose gradients have not been reduced yet.
        missing: Number of samples in those batches of the group that were None. `agree` adds up all processes' numbers.
        agreed_taint: Sum over the processes of what `Agreement.taint` returned in the last `reduce_gradients`; None if
            it was not exchanged.
    """

    def __init__(
        self,
        plugin: GradientAccumulationPlugin,
        world: World,
        strategy: Strategy,
        scaler: torch.amp.GradScaler | None,
        cursor: Cursor,
        models: list[nn.Module],
        optimizers: list[PreparedOptimizer],
    ) -> None:
        self.world = world
        self.strategy = strategy
        self.cursor = cursor
        self.models = models
        self.optimizers = optimizers
        self.scaler = scaler
        self.agreement = Agreement(world, strategy, cursor)
        self.always_agree = False
        self.watches_gradients = False
        self.guard: Callable[[PreparedOptimizer], bool] | None = None
        self.groups_end_with_loader = plugin.sync_with_dataloader
        self.sync_gradients = True
        self.optimizer_step_was_skipped = False
        self.autocasts = strategy.precision.compute is not None
        self.position = 0
        self.unfinished = False
        self.missing = 0
        self.manual_ids: set[int] = set()
        self.unreduced: set[PreparedOptimizer] = set()
        self.agreed_taint: Tensor | None = None
        self._micro_batches = plugin.num_steps
        self._delays_sync = strategy.delays_sync and not plugin.sync_each_batch
        self._weight: float | Tensor | None = None
        self._unweighted = False  # whether some micro-batch of this group has reported no weight
        self._steps_before = 0
        self._entered: Micro | None = None  # the last micro-batch that a user-defined loop used
        self._entered_number = 0  # its number, because equal groups share their facts
        self._entered_scale = 0.0  # the sum of the scales of the micro-batches used in this group
        self._correction = 1.0
        self._latest_loss: ref[Tensor] | None = None

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Gradient scaler for mixed float16 precision; None if the loss is not scaled."""
        return self._scaler

    @scaler.setter
    def scaler(self, value: torch.amp.GradScaler | None) -> None:
        self._scaler = value
        self.loss_scale = None if value is None or not value.is_enabled() else LossScale(value, self.strategy)

    # -- groups and steps ----------------------------------------------------------------------------------------

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per optimizer step."""
        return self._micro_batches

    @micro_batches.setter
    def micro_batches(self, value: int) -> None:
        check_int("gradient_accumulation_steps", value, 1)
        self._micro_batches = value

    def loader_group_size(self) -> int:
        """Return the number of micro-batches that a prepared loader puts into one full group."""
        return self._micro_batches if self.groups_end_with_loader else 1

    @property
    def steps(self) -> int:
        """Number of optimizer steps taken, including those before a resume; with several optimizers, the maximum."""
        return self._steps_before + max((optimizer.steps_taken for optimizer in self.optimizers), default=0)

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps_before = 0
        self._steps_before = value - self.steps

    def steps_of(self, optimizer: PreparedOptimizer) -> int:
        """Return the number of steps of one optimizer in this process, plus the run's steps before a resume."""
        return self._steps_before + optimizer.steps_taken

    def forget_group(self) -> None:
        """Discard the position in the current group and its sum of weights, and start a new group."""
        self.position = self.missing = 0
        self._weight = None
        self.unfinished = self._unweighted = False
        self.unreduced.clear()
        self._entered, self._correction = None, 1.0

    def reset(self) -> None:
        """Discard the current group, the step count and the votes, before a new run."""
        self.forget_group()
        self.agreement.reset()
        if self.loss_scale is not None:
            self.loss_scale.forget()
        self.manual_ids.clear()
        self.steps = 0

    # -- one micro-batch -----------------------------------------------------------------------------------------

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[Any]:
        """Begin a micro-batch, and set whether its backward pass reduces the gradients of ``models``.

        The returned context has no effect.
        """
        micro = self.cursor.micro
        if micro is not None and self.groups_end_with_loader:
            last = micro.last
        else:  # batches from other sources: every k-th ends a group
            self.position += 1
            running = get_running_loader()
            at_end = running is not None and self.groups_end_with_loader and running.end_of_dataloader
            last = at_end or self.position >= self._micro_batches
            self.position = 0 if last else self.position
        self.sync_gradients = last
        if self._delays_sync:
            for model in models:
                self.strategy.set_gradient_sync(model, last)
        return _NO_CONTEXT

    def note_entered(self) -> None:
        """Record that a user-defined loop processes the current micro-batch, and rescale the gradients if necessary.

        If the loop has skipped micro-batches of the group, the gradients become those of the mean over the samples of
        the processed micro-batches.
        """
        micro, before, number = self.cursor.micro, self._entered, self.cursor.number
        same = micro is before and number == self._entered_number
        if micro is None or same or not self.groups_end_with_loader:
            return
        if before is None or before.last or (micro.number != before.number + 1 and not self._has_gradients()):
            self._entered_scale = 0.0
        self._entered, self._entered_number, self._correction = micro, number, 1.0
        self._entered_scale += micro.scale
        if micro.last and self._entered_scale != micro.group_scale and self._entered_scale and self._weight is None:
            self._correction = micro.group_scale / self._entered_scale
            for parameter in self._iter_trained_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(self._correction)

    def _has_gradients(self) -> bool:
        # Rarely evaluated.
        return any(p.grad is not None and bool(p.grad.any()) for p in self._iter_trained_parameters())

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which gradients are not reduced over the processes."""
        return self.strategy.no_sync(_unwrap_compiled(model))

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which the backward pass reduces the gradients over the processes."""
        return self.strategy.sync_in_backward(_unwrap_compiled(model))

    def backward(
        self,
        loss: Tensor,
        *args: Any,
        weight: float | Tensor | None = None,
        by: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Scale the loss so that the group's gradients become those of its mean loss, and run the backward pass.

        ``loss`` is the mean loss of the micro-batch, as a 0-d tensor. ``weight`` is the number of items over which it
        is the mean. By default, a micro-batch is weighted by its number of samples, or by 1 without a prepared loader.
        ``by(loss, ...)`` is called instead of ``loss.backward(...)``.
        """
        self._latest_loss = ref(loss)
        micro = self.cursor.micro
        if weight is None and micro is not None and not self.groups_end_with_loader:
            weight = micro.samples  # the number of samples in the whole group is not known in advance
        if weight is not None:
            if self._unweighted:
                raise ValueError(
                    f"backward got weight={weight}, but earlier micro-batches of this accumulation group had no "
                    "weight. Pass weight=... for every micro-batch of a group, or for none."
                )
            if micro is not None and not micro.samples:
                weight = 0.0
            self._weight = weight if self._weight is None else self._weight + weight
            self.unfinished = True
            loss = loss * weight
        elif self._weight is not None:
            raise ValueError(
                "backward got no weight, but earlier micro-batches of this accumulation group had a weight. Pass "
                "weight=... for every micro-batch of a group, or for none."
            )
        else:
            self._unweighted = not self.sync_gradients
            scale = 1.0 / self._micro_batches if micro is None else micro.scale * self._correction
            if scale != 1.0:
                loss = loss * scale
        if self.loss_scale is not None:
            loss = self.loss_scale.scale(loss)
        votes = self.sync_gradients and (self.always_agree or self.unfinished)
        if votes and (not self.watches_gradients or self.strategy.votes_in_backward):
            self.agreement.vote(self._weight, self.missing)
        try:
            if by is None:
                loss.backward(*args, **kwargs)
            else:
                by(loss, *args, **kwargs)
        except RuntimeError as error:
            explained = self.strategy.explain(error)
            if explained is error:
                raise
            raise explained from error
        if self.manual_ids:
            self.unreduced.update(filter(self._has_manual_parameters, self.optimizers))
        if self.loss_scale is not None:
            self.loss_scale.check_backward()

    def _has_manual_parameters(self, optimizer: PreparedOptimizer) -> bool:
        return any(id(p) in self.manual_ids for group in optimizer.param_groups for p in group["params"])

    def get_latest_loss(self) -> Tensor | None:
        """Return the loss of the last backward pass; None before the first one, or if this loss has been freed."""
        return None if self._latest_loss is None else self._latest_loss()

    # -- before the optimizer steps ------------------------------------------------------------------------------

    def finish_gradients(self) -> None:
        """Divide the group's gradients by the total weight over all processes, if that has not been done yet."""
        if self.unfinished:
            self.agree()

    def reduce_gradients(self, optimizer: PreparedOptimizer) -> None:
        """Average one optimizer's gradients, which the backward pass has not reduced, over all processes."""
        self.unreduced.discard(optimizer)
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self.agreed_taint = self.strategy.reduce_gradients(parameters, self.agreement.taint())

    def drop_gradients(self) -> None:
        """Discard the gradients of the current group, whose remaining micro-batches are not processed."""
        self.forget_group()
        self.agreement.forget_losses()
        for model in self.models:
            self.strategy.drop_gradients(model)
        for optimizer in self.optimizers:
            optimizer.optimizer.zero_grad()

    def unscale_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Divide gradients by the group's total weight and by the float16 loss scale, unless this was already done.

        In manual optimization, gradients that have not been reduced over the processes are reduced too.
        ``optimizer=None`` stands for all prepared optimizers.
        """
        if self.unfinished:
            self.agree()
        for prepared in self.optimizers if self.unreduced else ():
            if prepared in self.unreduced and optimizer in (None, prepared, prepared.optimizer):
                self.reduce_gradients(prepared)
        if self.loss_scale is not None:
            chosen = self.optimizers if optimizer is None else [optimizer]
            self.loss_scale.unscale(o.optimizer if isinstance(o, PreparedOptimizer) else o for o in chosen)

    def agree_on_steps(self, *, finite: bool, at_once: bool) -> None:
        """Enable the exchange of all processes' votes in every step, and remove the `guard`.

        Args:
            finite: Whether to check that losses and, except with a loss scaler, gradients are finite.
            at_once: Whether to read the votes in the same step on accelerators too, although this waits for the device.
        """
        on_cpu = self.world.device.type == "cpu"
        self.always_agree = self.world.size > 1 or not on_cpu
        self.guard = None
        self.watches_gradients = finite and self.scaler is None  # the loss scaler checks them itself
        self.agreement.reset()
        self.agreement.watch_finite = finite
        self.agreement.immediate = at_once or on_cpu

    def agree(self) -> Agreement:
        """Exchange votes, divide gradients that are weighted sums by the total weight, and return the agreement.

        If `watches_gradients` is set, first check whether the gradients are finite.
        """
        agreement = self.agreement
        if self.watches_gradients:
            agreement.watch_gradients(self.optimizers)
        if not agreement.has_voted and not agreement.alone:
            agreement.vote(self._weight, self.missing)
        total = agreement.count()
        if self.unfinished:
            weight = self._weight if total is None else total
            assert weight is not None
            self._weight, self.unfinished = None, False
            divide_gradients(self._iter_trained_parameters(), weight, self.world.size)
            self.missing = 0  # weights that were reported do not include these samples
        elif agreement.missing:
            self.missing = agreement.missing
        return self.agreement

    def close_gap(self, samples: int) -> bool:
        """Weight the gradients as if the group had only contained the batches that were not None.

        Args:
            samples: Number of samples in the group, over all processes, with those of the batches that were None.

        Returns:
            False if no sample is left, so that no step can be taken.
        """
        left, self.missing = samples - self.missing, 0
        gradients = [local(p.grad) for p in dict.fromkeys(self._iter_trained_parameters()) if p.grad is not None]
        if left and gradients:
            torch._foreach_mul_(gradients, samples / left)
        return left > 0

    def not_finite_on(self) -> list[int]:
        """Return the ranks whose loss was not finite, and clear this rank's record. Must be called on all ranks."""
        local_finite = self.agreement.local_finite
        self.agreement.forget_losses()
        return [rank for rank, finite in enumerate(self.world.gather_objects(local_finite)) if not finite]

    def _iter_trained_parameters(self) -> Iterable[Tensor]:
        if self.models:
            return (p for model in self.models for p in self.strategy.unwrap(model).parameters())
        return (p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"])


def _unwrap_compiled(model: nn.Module) -> nn.Module:
    compiled = model._modules.get("_orig_mod")  # a model that was compiled after it was prepared
    return model if compiled is None else compiled
