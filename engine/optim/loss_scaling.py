"""Scaling of gradients by the float16 loss scale, and by the weights that a loop passes to ``backward``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...strategies import Strategy
from ...strategies.distributed import local
from .optimizer_state import list_parameters


class LossScale:
    """Wrapper of torch's ``GradScaler`` for any number of optimizers that share a backward pass.

    torch's ``update`` must run after all optimizers of a group have stepped. It is not known which optimizer steps
    last, so ``update`` runs before the next loss is scaled or a checkpoint is saved.

    Gradients that were unscaled may also be discarded without a step. This is noticed before the next loss is scaled.
    """

    def __init__(self, scaler: torch.amp.GradScaler, strategy: Strategy) -> None:
        self.scaler = scaler
        self._strategy = strategy
        self._due = self._is_stepping = False
        self._unscaled: dict[int, Optimizer] = {}
        self._norms: dict[int, list[str]] = {}  # of the gradients that were unscaled before the current backward pass

    def scale(self, loss: Tensor) -> Tensor:
        """Update the scale if an update is due, and return the loss multiplied by the scale.

        Raises:
            ValueError: If it is called by the closure of an optimizer's step.
        """
        if self._is_stepping:
            raise ValueError(
                "the closure of an optimizer's step runs a backward pass, but gradients with a float16 loss scale are "
                "unscaled before the step. Run the backward pass before step(), or use bfloat16 mixed precision."
            )
        self.update_scale()
        self._norms = self._settle_unscaled() if self._unscaled else {}
        return self.scaler.scale(loss)

    def check_backward(self) -> None:
        """Check that the backward pass added nothing to gradients that were already unscaled.

        Raises:
            ValueError: If it did, so the gradients are sums of scaled and unscaled ones.
        """
        if self._norms and any(_list_norms(self._unscaled[key]) != norms for key, norms in self._norms.items()):
            raise ValueError(
                "a backward pass added to gradients that gradient clipping or unscale_gradients had already divided by "
                "the float16 loss scale. Call step or zero_grad before the next backward pass. To accumulate "
                "gradients, set accumulate_grad_batches or gradient_accumulation_steps."
            )

    def update_scale(self) -> None:
        """Update the scale, if `step` was called since the last update."""
        if self._due:
            self._due = False
            self._unscaled.clear()
            self.scaler.update()

    def _settle_unscaled(self) -> dict[int, list[str]]:
        """Forget optimizers whose unscaled gradients were discarded without a step, and return the others' norms."""
        norms = {key: _list_norms(optimizer) for key, optimizer in self._unscaled.items()}
        kept = {key: values for key, values in norms.items() if any(value != "0.0" for value in values)}
        if not kept:
            self._due = True  # an overflow may be the reason for the discard, so it lowers the scale as after a step
            self.update_scale()
        for key in norms.keys() - kept.keys():
            self._unscaled.pop(key, None)
            self.scaler._per_optimizer_states.pop(key, None)
        return kept

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the optimizers' gradients by the scale, unless they have already been divided in this step."""
        for optimizer in optimizers:
            if id(optimizer) in self._unscaled or self.scaler._scale is None:
                continue
            if all(p.grad is None for p in list_parameters(optimizer)):
                continue
            same = self._find_unscaled(optimizer) if self._unscaled else None
            if same is not None:
                self.scaler._per_optimizer_states[id(optimizer)] = self.scaler._per_optimizer_states[id(same)]
            else:
                self.scaler.unscale_(optimizer)
                for flag in self._overflows(optimizer):
                    self._strategy.agree_on_overflow(flag)
            self._unscaled[id(optimizer)] = optimizer

    def _find_unscaled(self, optimizer: Optimizer) -> Optimizer | None:
        """Return an unscaled optimizer of the same parameters, such as one that wraps ``optimizer`` (as SAM does)."""
        parameters = set(list_parameters(optimizer))
        return next((o for o in self._unscaled.values() if parameters <= set(list_parameters(o))), None)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
        """Call the optimizer's ``step`` with the arguments, unless a gradient has overflowed.

        Returns:
            The return value of the optimizer's ``step`` (None if that was not called), and whether the step was
            skipped.

        Raises:
            ValueError: If a closure among the arguments runs a backward pass.
        """
        # Not left to fused kernels: SGD would treat its momentum as initialized after a skipped step (torch 2.13).
        if self.has_overflowed(optimizer):
            return None, True
        with self.refusing_backward():
            if id(optimizer) in self._unscaled:
                return self.scaler.step(optimizer, *args, **kwargs), False
            return optimizer.step(*args, **kwargs), False

    def has_overflowed(self, optimizer: Optimizer) -> bool:
        """Unscale the optimizer's gradients before its step, and return whether one of them has overflowed."""
        self.unscale((optimizer,))
        if id(optimizer) not in self._unscaled:
            return False
        self._due = True
        return any(flag.item() for flag in self._overflows(optimizer))

    def share_overflows(self, optimizers: Sequence[Optimizer]) -> None:
        """Unscale the optimizers' gradients, and set the overflow flags of all if one of their gradients overflowed."""
        self.unscale(optimizers)
        flags = [flag for o in optimizers if id(o) in self._unscaled for flag in self._overflows(o)]
        if flags:
            overflow = torch.stack([flag.to(flags[0].device) for flag in flags]).amax()
            for flag in flags:
                flag.copy_(overflow)

    @contextmanager
    def refusing_backward(self) -> Iterator[None]:
        """Return a context for a step or its closure, in which `scale` raises an error."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def _overflows(self, optimizer: Optimizer) -> Collection[Tensor]:
        """Return the overflow flag of each device, in the tensors that the ``update`` of torch's scaler reads."""
        return self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler after the update that is due."""
        self.update_scale()
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of the scaler."""
        self.forget()
        self.scaler.load_state_dict(state)

    def forget(self) -> None:
        """Forget which gradients were unscaled, and the update that is due."""
        self._due = False
        self._unscaled.clear()
        self._norms.clear()
        self.scaler._per_optimizer_states.clear()


def _list_norms(optimizer: Optimizer) -> list[str]:
    """Return the gradients' norms as text, in which NaN equals NaN. It waits for the device."""
    gradients = [p.grad for p in list_parameters(optimizer) if p.grad is not None]
    gradients = [g.coalesce().values() if g.is_sparse else local(g) for g in gradients]
    return [str(torch.linalg.vector_norm(gradient).item()) for gradient in gradients]


def scale_gradients(parameters: Iterable[Tensor], numerator: float | Tensor, denominator: float | Tensor = 1.0) -> None:
    """Multiply gradients by ``numerator / denominator`` in place; by zero if the denominator is not positive."""
    # Each gradient once, even if two models share a parameter.
    gradients = [local(p.grad) for p in dict.fromkeys(parameters) if p.grad is not None]
    if gradients:
        dtype = torch.promote_types(gradients[0].dtype, torch.float32).to_real()
        numerator, denominator = (
            torch.as_tensor(value, device=gradients[0].device, dtype=dtype) for value in (numerator, denominator)
        )
        torch._foreach_mul_(gradients, torch.where(denominator > 0, numerator / denominator, 0.0))
