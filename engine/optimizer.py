"""Optimizers and schedulers that act at the end of a group of micro-batches, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from .accelerator import Accelerator


class PreparedOptimizer(Optimizer):
    """The user's optimizer, whose ``step`` and ``zero_grad`` do nothing inside a group of micro-batches.

    Holds no state of its own: groups, state and defaults are the wrapped optimizer's.
    """

    def __init__(self, optimizer: Optimizer, accelerator: Accelerator) -> None:
        self.optimizer = optimizer
        self._accelerator = accelerator

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """At the end of a group: take the step, unless a float16 gradient overflowed."""
        accelerator = self._accelerator
        if not accelerator.sync_gradients:
            return None
        if accelerator.unfinished:
            accelerator.finish_gradients()
        if accelerator.scaler is None:
            return self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        return accelerator.scaled_step(self.optimizer, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """At the end of a group: drop the gradients."""
        if self._accelerator.sync_gradients:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def __getstate__(self) -> Any:
        raise TypeError("a prepared optimizer is bound to its Accelerator; pickle its state_dict() instead.")


class PreparedScheduler:
    """The user's scheduler, which advances only when the optimizer really stepped, and once per optimizer step."""

    def __init__(self, scheduler: Any, accelerator: Accelerator) -> None:
        self.scheduler = scheduler
        self._accelerator = accelerator

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, unless inside a group or the step was skipped."""
        accelerator = self._accelerator
        if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
            self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
