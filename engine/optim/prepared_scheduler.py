"""Wrapper of a scheduler that advances only for optimizer steps that were applied."""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.lr_scheduler import LambdaLR

from ...common.messages import abbreviate, warn
from .accumulation import Accumulation, PreparedOptimizer

_warned_of_functions = WeakSet[Any]()


def storable_state(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's state without functions, as `LambdaLR` omits its own. Warn once if there are any.

    A load only updates the state, so the scheduler of the resumed run keeps its own functions.
    """
    state: dict[str, Any] = scheduler.state_dict()
    functions = [name for name, v in state.items() if callable(v) and not isinstance(v, torch.device)]
    wrapped = getattr(scheduler, "scheduler", scheduler)
    if functions and wrapped not in _warned_of_functions:
        _warned_of_functions.add(wrapped)
        warn(
            f"the state of {type(wrapped).__name__} contains functions, which are not saved: {abbreviate(functions)}. "
            "A resumed run uses those of its own scheduler."
        )
    return {name: value for name, value in state.items() if name not in functions}


class PreparedScheduler:
    """Wrapper of the user's scheduler, which advances only for optimizer steps that were applied.

    A call of `step` without arguments advances the schedule by the number of processes that share the batches, as in
    Accelerate, or by one with ``split_batches``. With any world size, the learning rate then follows the number of
    samples seen. Such a call does not advance a schedule with ``total_steps`` beyond its end.

    Args:
        scheduler: The scheduler to wrap.
        accumulation: The Accelerator's gradient accumulation, which determines when a group ends.
        advances: Number of steps of the schedule per call of `step`.
        follows_optimizer: False to pass each call of `step` to the wrapped scheduler. Default: True.
    """

    def __init__(
        self, scheduler: Any, accumulation: Accumulation, advances: int, *, follows_optimizer: bool = True
    ) -> None:
        self.scheduler = scheduler
        self.advances = advances
        self.follows_optimizer = follows_optimizer
        self._accumulation = accumulation
        self._last_counts = (0, 0)
        self._warned = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, unless a group is incomplete or all optimizer steps since the last call were skipped.

        Args:
            args: A metric or an epoch for the wrapped scheduler's ``step``, which is then called only once.
            kwargs: Keyword arguments of the wrapped scheduler's ``step``, which is then called only once.
        """
        if not self.follows_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._accumulation.sync_gradients:
            return
        steps, skipped = self.since
        if skipped and not steps:
            return
        self._last_counts = self._count_steps()
        if args or kwargs:
            # If ReduceLROnPlateau got one value of a metric twice, it would count an epoch without improvement.
            self.scheduler.step(*args, **kwargs)
            return
        if steps > 1 and self.advances > 1:
            self._warn(
                f"{type(self.scheduler).__name__}.step() was called after {steps} optimizer steps. A prepared "
                f"scheduler advances by {self.advances} per call, one for each process, so a schedule that counts "
                f"epochs runs {self.advances} times too fast. For such a schedule, use "
                "Accelerator(step_scheduler_with_optimizer=False)."
            )
        if self._has_ended():
            self._warn(
                f"{type(self.scheduler).__name__} has reached total_steps={self.scheduler.total_steps}; the learning "
                f"rate stays at {self.scheduler.get_last_lr()[0]:.3g}. The scheduler advances by {self.advances} per "
                "optimizer step. Increase total_steps."
            )
        for _ in range(self.advances):
            # OneCycleLR raises an error beyond its end, which the last, short batches of epochs can reach.
            if not self._has_ended():
                self.scheduler.step()

    def _has_ended(self) -> bool:
        total = getattr(self.scheduler, "total_steps", None)
        return total is not None and getattr(self.scheduler, "last_epoch", -1) >= total

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warn(text)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped scheduler."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped scheduler.

        Args:
            state_dict: A state of the wrapped scheduler's class.
        """
        self.scheduler.load_state_dict(state_dict)

    @property
    def since(self) -> tuple[int, int]:
        """Number of steps that the optimizer has taken, and number skipped, since `step` last advanced the schedule."""
        steps, skipped = self._count_steps()
        return steps - self._last_counts[0], skipped - self._last_counts[1]

    def resume(
        self, state: dict[str, Any], since: tuple[int, int], advances: int, *, batch_size_unchanged: bool
    ) -> None:
        """Continue a saved schedule from its position.

        Args:
            state: The saved state of the wrapped scheduler.
            since: The saved value of `since`.
            advances: The saved value of `advances`.
            batch_size_unchanged: Whether an optimizer step processes as many samples as in the saved run.
        """
        self.scheduler.load_state_dict(state)
        steps, skipped = self._count_steps()
        self._last_counts = (steps - since[0], skipped - since[1])
        convertible = self.follows_optimizer and batch_size_unchanged and advances != self.advances
        if convertible and not self._convert(advances):
            self.advances = advances  # the unit of the schedule's length was saved with it

    def _convert(self, saved_advances: int) -> bool:
        """Rescale the position of a ``LambdaLR`` saved with another world size. Return False if it was not rescaled.

        The position is not rescaled if the saved learning rate shows that the ``lr_lambda`` functions do not depend on
        the world size.
        """
        scheduler = self.scheduler
        if not isinstance(scheduler, LambdaLR):
            return False
        position, remainder = divmod(scheduler.last_epoch * self.advances, saved_advances)
        if remainder:
            return False
        converted, unchanged = (
            all(
                math.isclose(base * function(at), rate, rel_tol=1e-9, abs_tol=1e-15)
                for base, function, rate in zip(
                    scheduler.base_lrs, scheduler.lr_lambdas, scheduler.get_last_lr(), strict=True
                )
            )
            for at in (position, scheduler.last_epoch)
        )
        if unchanged and not converted:
            return False
        scheduler.last_epoch, scheduler._step_count = position, position + 1
        return True

    @property
    def optimizers(self) -> list[PreparedOptimizer]:
        """Prepared wrappers of the scheduler's optimizer; empty if that optimizer is not prepared."""
        driven = getattr(self.scheduler, "optimizer", None)
        return [o for o in self._accumulation.optimizers if driven is o or driven is o.optimizer]

    def _count_steps(self) -> tuple[int, int]:
        prepared = self.optimizers
        return sum(o.steps_taken for o in prepared), sum(o.skipped for o in prepared)

    def __getattr__(self, name: str) -> Any:
        if name in ("scheduler", "optimizers"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)
