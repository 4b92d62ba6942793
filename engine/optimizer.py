"""Optimizers and schedulers that act at the end of a group of micro-batches, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from .as_built import built_options

if TYPE_CHECKING:
    from .accelerator import Accelerator


class PreparedOptimizer(Optimizer):
    """The user's optimizer, whose ``step`` and ``zero_grad`` do nothing inside a group of micro-batches.

    Holds no state of its own: groups, state and defaults are the wrapped optimizer's.
    """

    def __init__(self, optimizer: Optimizer, accelerator: Accelerator) -> None:
        self.optimizer = optimizer
        self.built = self.held = built_options(optimizer)  # by the script; and those that hold, which a resume changes
        self.taken = 0  # steps in this process
        self.skipped = 0
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
        if self in accelerator.unreduced:
            accelerator.reduce_gradients(self)
        skipped = False
        if accelerator.loss_scale is not None:
            result, skipped = accelerator.loss_scale.step(self.optimizer, closure)
        else:
            result = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        accelerator.optimizer_step_was_skipped = skipped
        self.taken += not skipped
        self.skipped += skipped
        return result

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

    def __getattr__(self, name: str) -> Any:
        # Hooks, and what an optimizer of one's own adds.
        if name == "optimizer" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def __getstate__(self) -> Any:
        raise TypeError("a prepared optimizer is bound to its Accelerator; pickle its state_dict() instead.")


class PreparedScheduler:
    """The user's scheduler, which advances only when the optimizer really stepped, and once per optimizer step."""

    def __init__(self, scheduler: Any, accelerator: Accelerator) -> None:
        self.scheduler = scheduler
        self._accelerator = accelerator
        self._seen = (0, 0)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, unless inside a group, or if all of the optimizer's steps since the last call were skipped."""
        accelerator = self._accelerator
        if not accelerator.sync_gradients:
            return
        if accelerator.loss_scale is not None:
            taken, skipped = self.since
            if skipped and not taken:
                return
            self._seen = self._counts()
        self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)

    @property
    def since(self) -> tuple[int, int]:
        """The steps that its optimizer has taken, and those it skipped, since this was called last."""
        taken, skipped = self._counts()
        return taken - self._seen[0], skipped - self._seen[1]

    def resume(self, since: tuple[int, int]) -> None:
        """Go on where `since` was this."""
        taken, skipped = self._counts()
        self._seen = (taken - since[0], skipped - since[1])

    def _counts(self) -> tuple[int, int]:
        own = getattr(self.scheduler, "optimizer", None)
        known = [o for o in self._accelerator.optimizers if own is o or own is o.optimizer]
        return sum(o.taken for o in known), sum(o.skipped for o in known)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
