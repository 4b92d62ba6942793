"""Closure of an optimizer step, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ....common.messages import name_type, warn
from .closure import AbstractClosure, OutputResult

__all__ = ["Closure", "ClosureResult"]

_RULE = "It must return the loss (a tensor), a dict with the loss under 'loss', or None."


@dataclass
class ClosureResult(OutputResult):
    """Loss of a step, as ``closure_loss`` and without its autograd graph as ``loss``, and its further outputs."""

    closure_loss: Tensor | None
    extra: dict[str, Any] = field(default_factory=dict)
    loss: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.closure_loss is not None:
            self.loss = self.closure_loss.detach().clone()

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        """Return the result for the output of a training step.

        Args:
            training_step_output: A loss, a dict with ``"loss"``, or None.
            normalize: Divisor of the loss. Default: 1.

        Raises:
            ValueError: If the output is anything else.
        """
        extra: dict[str, Any] = {}
        loss = training_step_output
        if isinstance(loss, Mapping):
            extra = {name: value for name, value in loss.items() if name != "loss"}
            loss = loss.get("loss")
            if loss is None:
                keys = ", ".join(map(repr, training_step_output)) or "none"
                raise ValueError(f"training_step returned a dict without 'loss' (keys: {keys}). {_RULE}")
        if loss is not None and not isinstance(loss, Tensor):
            raise ValueError(f"training_step returned {name_type(loss)}. {_RULE}")
        return cls(None if loss is None else loss / normalize, extra=extra)

    def asdict(self) -> dict[str, Any]:
        """Return the loss without its graph, under ``"loss"``, and the further outputs."""
        return {"loss": self.loss, **self.extra}


class Closure(AbstractClosure[ClosureResult]):
    """Closure for ``optimizer.step`` that runs a training step, clears the gradients and runs the backward pass.

    Args:
        step_fn: Function that runs the training step and returns its result.
        backward_fn: Function that runs the backward pass of a loss. Default: None, which skips the backward pass.
        zero_grad_fn: Function that clears the gradients. Default: None, which keeps them.
    """

    def __init__(
        self,
        step_fn: Callable[[], ClosureResult],
        backward_fn: Callable[[Tensor], None] | None = None,
        zero_grad_fn: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._step_fn, self._backward_fn, self._zero_grad_fn = step_fn, backward_fn, zero_grad_fn

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Run the step, clear the gradients, run the backward pass of a loss, if any, and return the step's result."""
        result = self._step_fn()
        if result.closure_loss is None:
            warn("training_step returned None, so the backward pass is skipped.")
        if self._zero_grad_fn is not None:
            self._zero_grad_fn()
        if self._backward_fn is not None and result.closure_loss is not None:
            self._backward_fn(result.closure_loss)
        return result

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Run the closure and return the loss without its graph, or None."""
        super().__call__(*args, **kwargs)
        assert self._result is not None
        return self._result.loss
