"""Post-local SGD: after some steps with reduced gradients, processes step separately and average their parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...common.validation import check_int
from ..distributed import World
from .coalesced import average


class LocalSteps:
    """Step count of a run with local steps, and the schedule by which parameters are averaged.

    Args:
        every: Number of optimizer steps between two averages of the parameters.
        start: Number of optimizer steps before local steps begin.

    Attributes:
        count: Number of completed optimizer steps.

    Source: Don't Use Large Mini-Batches, Use Local SGD (Lin et al., 2020), https://arxiv.org/abs/1808.07217
    """

    def __init__(self, every: int, start: int) -> None:
        self.every = every
        self.start = start
        self.count = 0
        self._apart = False  # whether a step was taken without synchronization since the last average

    @property
    def alone(self) -> bool:
        """True if the next optimizer step is a local step, in which gradients are not reduced."""
        return self.count >= self.start

    def stepped(self, optimizer: Optimizer, world: World) -> None:
        """Count a step of ``optimizer``, and average its parameters if the schedule requires it."""
        self._apart = self.alone
        self.count += 1
        if self._apart and (self.count - self.start) % self.every == 0:
            self.meet(optimizer, world)

    def meet(self, optimizer: Optimizer, world: World) -> None:
        """Average the parameters if the processes have stepped separately since the last average."""
        if self._apart:
            average(_list_trained_parameters(optimizer), world)
            self._apart = False

    def state_dict(self, optimizer: Optimizer, world: World) -> dict[str, Any]:
        """Return the optimizer's state and the number of completed steps.

        During local steps, parameters and optimizer state are averaged first.
        """
        self.meet(optimizer, world)
        if self.alone:
            slots = dict(_list_slots(optimizer))
            keys = world.gather_objects(list(slots))
            shared = set(keys[0]).intersection(*keys)
            average([slots[key] for key in keys[0] if key in shared], world)
        return {**optimizer.state_dict(), "local_sgd_count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of completed steps, which is zero if the state was saved without local steps."""
        self.count = state.get("local_sgd_count", 0)
        self._apart = False


def _list_trained_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _list_slots(optimizer: Optimizer) -> list[tuple[tuple[int, str], Tensor]]:
    """Return the optimizer's inexact state tensors by parameter index and name. 0-d tensors are omitted."""
    slots = []
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.ndim and (value.is_floating_point() or value.is_complex()):
                slots.append(((number, name), value))
    return slots


def parse_local_steps(every: Any, start: Any) -> LocalSteps | None:
    """Return the `LocalSteps` for ``local_sgd_steps`` and ``local_sgd_start``, or None if local steps are disabled."""
    for name, value, least in (("local_sgd_steps", every, 1), ("local_sgd_start", start, 0)):
        if value is not None:
            check_int(name, value, least)
    if every is None and start:
        raise ValueError(
            f"local_sgd_start={start} needs local_sgd_steps, the interval at which the parameters are averaged. Set "
            "local_sgd_steps too."
        )
    return None if every is None else LocalSteps(every, start or 0)
