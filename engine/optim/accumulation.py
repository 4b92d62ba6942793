"""One optimizer step: its micro-batches, their gradients, and what must hold before the optimizer moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...common.validation import check_int
from ...strategies import Precision, Strategy
from ..configuration import AutocastKwargs, GradientAccumulationPlugin
from ..process_state import Process
from .agreement import Agreement
from .loss_scaling import LossScale, divide_gradients
from .prepared_optimizer import PreparedOptimizer

_NOTHING = nullcontext()


class Stepping(Process):
    """The part of an `Accelerator` that makes one optimizer step of a group of micro-batches.

    Attributes:
        sync_gradients: whether the running micro-batch is its group's last, after which the optimizer steps.
        optimizer_step_was_skipped: whether the last step was left out, as a float16 gradient overflowed.
        unfinished: whether gradients are still to be divided by reported weights.
        unreduced: the optimizers whose gradients have been left on their process.
    """

    precision: Precision
    strategy: Strategy
    agreement: Agreement
    loss_scale: LossScale | None
    scaler: torch.amp.GradScaler | None
    models: list[nn.Module]
    optimizers: list[PreparedOptimizer]

    def _begin_steps(self, groups: GradientAccumulationPlugin) -> None:
        self._accumulate = groups.num_steps
        self.groups_end_with_loader = groups.sync_with_dataloader
        if groups.sync_each_batch:
            self.strategy.delays_sync = False
        self.sync_gradients = True
        self.optimizer_step_was_skipped = False
        self.always_agree = False
        self.unreduced: set[PreparedOptimizer] = set()
        self.forget_group()

    def forget_group(self) -> None:
        """No micro-batch of a group has run."""
        self._count = 0
        self._weight: float | Tensor | None = None
        self.unfinished = self._unweighed = False
        self.unreduced.clear()

    @property
    def inside_group(self) -> bool:
        """Whether micro-batches of a group that no loader knows of have run, whose gradients are in no state."""
        return self._count > 0

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step; may be changed between steps."""
        return self._accumulate

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        check_int("gradient_accumulation_steps", value, 1)
        self._accumulate = value

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[Any]:
        """The context of one micro-batch: gradients are reduced, and the optimizer steps, at its group's last one."""
        micro = self.cursor.micro
        if micro is not None and self.groups_end_with_loader:
            last = micro.last
        else:  # batches from elsewhere: every k-th ends a group
            self._count += 1
            last = self._count >= self._accumulate
            self._count = 0 if last else self._count
        self.sync_gradients = last
        if self.strategy.delays_sync:
            for model in models:
                self.strategy.set_gradient_sync(model, last)
        return _NOTHING

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context in which gradients stay on their process."""
        return self.strategy.no_sync(_wrapper(model))

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context whose backward reduces the gradients, also those of forwards that ran in `no_sync`."""
        return self.strategy.sync_in_backward(_wrapper(model))

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The run's precision for computations outside a prepared model.

        Args:
            autocast_handler: how; ``AutocastKwargs(enabled=False)`` computes in full precision within a prepared one.
        """
        if autocast_handler is None:
            return self.precision.context(self.device) or _NOTHING
        return torch.autocast(
            self.device.type,
            dtype=self.precision.compute,
            enabled=autocast_handler.enabled and self.precision.compute is not None,
            cache_enabled=autocast_handler.cache_enabled,
        )

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | Tensor | None = None,
        by: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add this micro-batch's share of the gradient.

        Give the plain mean loss: it is weighed by the samples the loader put into the micro-batch, so that the step's
        gradient is the mean over all samples of the group, on all processes.

        Args:
            loss: 0-d tensor.
            weight: what the loss is a mean over, where that is not samples (tokens): then the step's gradient is the
                mean over all of these. Give it in every micro-batch of a group, or in none.
            by: what to call with the loss, weighed and scaled as it has to be, in the place of ``Tensor.backward``.
            kwargs: for ``Tensor.backward``.
        """
        micro = self.cursor.micro
        if weight is None and micro is not None and not self.groups_end_with_loader:
            weight = micro.samples  # nobody knows ahead what the whole group will hold
        if weight is not None:
            if self._unweighed:
                raise ValueError("this group's earlier micro-batches reported no weight, this one does.")
            if micro is not None and not micro.samples:
                weight = 0.0
            self._weight = weight if self._weight is None else self._weight + weight
            self.unfinished = True
            loss = loss * weight
        elif self._weight is not None:
            raise ValueError("this group's earlier micro-batches reported a weight, this one does not.")
        else:
            self._unweighed = not self.sync_gradients
            scale = 1.0 / self._accumulate if micro is None else micro.scale
            if scale != 1.0:
                loss = loss * scale
        if self.loss_scale is not None:
            loss = self.loss_scale.scale(loss)
        if self.sync_gradients and (self.always_agree or self.unfinished):
            self.agreement.vote(self._weight)
        try:
            if by is None:
                loss.backward(**kwargs)
            else:
                by(loss, **kwargs)
        except RuntimeError as error:
            better = self.strategy.explain(error)
            if better is error:
                raise
            raise better from error

    def finish_gradients(self) -> None:
        """Divide the group's gradients by the weights that all processes reported. Happens by itself when needed."""
        if self.unfinished:
            self.agree()

    def reduce_gradients(self, optimizer: PreparedOptimizer) -> None:
        """Average what backward has left of an optimizer's gradients on its process. Happens by itself when needed."""
        self.unreduced.discard(optimizer)
        self.strategy.reduce_gradients(p for group in optimizer.param_groups for p in group["params"])

    def drop_gradients(self) -> None:
        """Forget the micro-batches of the group so far: the group will not be finished."""
        self.forget_group()
        self.agreement.forget_losses()
        for model in self.models:
            self.strategy.drop_gradients(model)
        for optimizer in self.optimizers:
            optimizer.optimizer.zero_grad()

    def agree_on_steps(self, *, finite: bool, at_once: bool) -> None:
        """Let every step's backward carry what all processes must agree on; read it with `agree`.

        Args:
            finite: whether losses are watched (with float16 the loss scaler does that).
            at_once: read it in the same step on accelerators too, which waits for the device.
        """
        self.always_agree = self.num_processes > 1 or self.device.type != "cpu"
        self.agreement.reset()
        self.agreement.watch_finite = finite and self.scaler is None
        self.agreement.immediate = at_once or self.device.type == "cpu"

    def not_finite_on(self) -> list[int]:
        """The processes whose loss was not finite, once `agree` said there are some. Forgets them."""
        own = self.agreement.own_finite
        self.agreement.finite = self.agreement.own_finite = True
        return [rank for rank, fine in enumerate(self.world.gather_objects(own)) if not fine]

    def agree(self) -> Agreement:
        """Read what all processes agreed on in the backward that has just run. For loops with ``always_agree``."""
        total = self.agreement.count()
        if self.unfinished:
            weight = self._weight if total is None else total
            assert weight is not None
            self._weight, self.unfinished = None, False
            divide_gradients(self._trained_parameters(), weight, self.world.size)
        return self.agreement

    def _trained_parameters(self) -> Iterable[Tensor]:
        if self.models:
            return (p for model in self.models for p in self.strategy.unwrap(model).parameters())
        return (p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"])

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """At the end of a group: clip the gradients' total norm in place.

        Returns:
            The norm before clipping (0-d tensor); None inside a group, where there is nothing to clip yet.
        """
        if not self.sync_gradients:
            return None
        self.unscale_gradients()
        return self.strategy.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """At the end of a group: clamp every gradient element to ``[-clip_value, clip_value]`` in place."""
        if self.sync_gradients:
            self.unscale_gradients()
            self.strategy.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Make the gradients the true ones: divide by reported weights, and by float16's loss scale."""
        self.finish_gradients()
        for prepared in self.optimizers if self.unreduced else ():
            if prepared in self.unreduced and optimizer in (None, prepared, prepared.optimizer):
                self.reduce_gradients(prepared)
        if self.loss_scale is not None:
            chosen = self.optimizers if optimizer is None else [optimizer]
            self.loss_scale.unscale(o.optimizer if isinstance(o, PreparedOptimizer) else o for o in chosen)


def _wrapper(model: nn.Module) -> nn.Module:
    compiled = model._modules.get("_orig_mod")  # a prepared model that was compiled afterwards
    return model if compiled is None else compiled
