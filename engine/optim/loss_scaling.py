"""Scaling of gradients by the float16 loss scale, and by the weights that a loop passes to ``backward``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    """

    def __init__(self, scaler: torch.amp.GradScaler, strategy: Strategy) -> None:
        self.scaler = scaler
        self._strategy = strategy
        self._due = False
        self._unscaled: set[int] = set()

    def scale(self, loss: Tensor) -> Tensor:
        """Update the scale if an update is due, and return the loss multiplied by the scale."""
        self.update_scale()
        return self.scaler.scale(loss)

    def update_scale(self) -> None:
        """Update the scale, if `step` was called since the last update."""
        if self._due:
            self._due = False
            self._unscaled.clear()
            self.scaler.update()

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the optimizers' gradients by the scale, unless they have already been divided in this step."""
        for optimizer in optimizers:
            if id(optimizer) not in self._unscaled:
                self.scaler.unscale_(optimizer)
                for flag in self._overflows(optimizer):
                    self._strategy.agree_on_overflow(flag)
                self._unscaled.add(id(optimizer))

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

    def _overflows(self, optimizer: Optimizer) -> Iterable[Tensor]:
        """Return the overflow flag of each device, in the tensors that the ``update`` of torch's scaler reads."""
        return self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()


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
