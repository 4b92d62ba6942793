"""Scaling of gradients by the float16 loss scale, and by the weights that a loop passes to ``backward``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...strategies import Strategy
from ...strategies.distributed import local


class LossScale:
    """Wrapper of torch's ``GradScaler`` for any number of optimizers that share a backward pass.

    torch's ``update`` must run after all optimizers of a group have stepped. It is not known which optimizer steps
    last, so ``update`` runs before the next loss is scaled or a checkpoint is saved.

    Gradients that were unscaled may be discarded without a step. They are found before the next loss is scaled.
    """

    def __init__(self, scaler: torch.amp.GradScaler, strategy: Strategy) -> None:
        self.scaler = scaler
        self._strategy = strategy
        self._due = False
        self._unscaled: dict[int, Optimizer] = {}
        self._discarded: set[int] = set()
        self._versions: dict[int, int] = {}  # of the gradients that were unscaled before the current backward pass

    def scale(self, loss: Tensor) -> Tensor:
        """Update the scale if an update is due, and return the loss multiplied by the scale."""
        self.update_scale()
        if self._unscaled:
            self._forget_discarded()
            self._versions = {key: _sum_versions(optimizer) for key, optimizer in self._unscaled.items()}
        return self.scaler.scale(loss)

    def check_backward(self) -> None:
        """Check that the backward pass added nothing to gradients that were already unscaled.

        Raises:
            ValueError: If it did, so the gradients are sums of scaled and unscaled ones.
        """
        versions, self._versions = self._versions, {}
        if any(_sum_versions(self._unscaled[key]) != version for key, version in versions.items()):
            raise ValueError(
                "a backward pass added gradients to gradients that were already divided by the float16 loss scale, by "
                "clip_grad_norm_, clip_grad_value_ or unscale_gradients. Call the optimizer's step or zero_grad first, "
                "and clip only when accelerator.sync_gradients is True."
            )

    def note_discarded(self, optimizer: Optimizer) -> None:
        """Record that the optimizer's gradients were set to zero, or are None."""
        if id(optimizer) in self._unscaled:
            self._discarded.add(id(optimizer))

    def update_scale(self) -> None:
        """Update the scale, if `step` was called since the last update."""
        if self._due:
            self._due = False
            self._unscaled.clear()
            self._discarded.clear()
            self.scaler.update()

    def _forget_discarded(self) -> None:
        """Forget the optimizers whose unscaled gradients no step has used."""
        discarded = {
            key: optimizer
            for key, optimizer in self._unscaled.items()
            if key in self._discarded or not any(True for _ in _list_gradients(optimizer))
        }
        if len(discarded) == len(self._unscaled) and any(map(self._overflows, discarded.values())):
            self._due = True  # their overflow may be the reason, so it lowers the scale as after a step
            self.update_scale()
            return
        for key in discarded:
            del self._unscaled[key]
            self.scaler._per_optimizer_states.pop(key, None)
        self._discarded.clear()

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the optimizers' gradients by the scale, unless they have already been divided in this step."""
        for optimizer in optimizers:
            if id(optimizer) not in self._unscaled:
                self.scaler.unscale_(optimizer)
                for flag in self._overflows(optimizer):
                    self._strategy.agree_on_overflow(flag)
                self._unscaled[id(optimizer)] = optimizer

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> tuple[Any, bool]:
        """Step the optimizer, unless a gradient has overflowed.

        Returns:
            The return value of the optimizer's ``step`` (None if that was not called), and whether the step was
            skipped.
        """
        self.unscale((optimizer,))
        skipped = any(flag.item() for flag in self._overflows(optimizer))
        self._due = True
        arguments = () if closure is None else (closure,)
        return self.scaler.step(optimizer, *arguments), skipped

    def _overflows(self, optimizer: Optimizer) -> Collection[Tensor]:
        """Return the overflow flag of each device, in the tensors that the ``update`` of torch's scaler reads."""
        return self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()


def _list_gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from (parameter.grad for parameter in group["params"] if parameter.grad is not None)


def _sum_versions(optimizer: Optimizer) -> int:
    """Return a number that each change of a gradient in place, and each new gradient, increases."""
    return sum(1 + local(gradient)._version for gradient in _list_gradients(optimizer))


def divide_gradients(parameters: Iterable[Tensor], weight: float | Tensor, size: int) -> None:
    """Convert gradients of a weighted sum, averaged over ``size`` processes, to those of the weighted mean, in place.

    ``weight`` is the sum of the weights over all processes. If it is not positive, the gradients are multiplied by
    zero.
    """
    # Each gradient once, even if two models share a parameter.
    gradients = [local(p.grad) for p in dict.fromkeys(parameters) if p.grad is not None]
    if gradients:
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        weight = torch.as_tensor(weight, device=gradients[0].device, dtype=dtype)
        torch._foreach_mul_(gradients, torch.where(weight > 0, size / weight, 0.0))
