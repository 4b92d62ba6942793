"""Reading a logged value that a decision hangs on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..strategies import nearest

if TYPE_CHECKING:
    from ..trainer import Trainer

MODES = ("min", "max")


def monitored_value(trainer: Trainer, name: str, who: str, strict: bool = True) -> float | None:
    """The newest value of ``name``, the same on every process. All processes must ask.

    Args:
        trainer: whose logged values are meant.
        name: the logged name.
        who: who asks, for the error.
        strict: whether a name that was never logged is an error; else the answer is None.

    Raises:
        ValueError: lists what was logged.
    """
    agreed = trainer.logbook.callback_values
    if name in agreed:
        return float(agreed[name])
    own = trainer.metrics.latest().get(name)
    world = trainer.accelerator.world
    if own is not None:  # a step's value, of this process alone
        value = torch.tensor([float(own)], dtype=torch.float64)
        return float(world.all_reduce(value.to(world.device) if world.size > 1 else value, "mean"))
    if not strict:
        return None
    logged = sorted({*agreed, *trainer.metrics.latest()})
    raise ValueError(
        f"{who}={name!r} was never logged. Logged so far: {', '.join(logged) or 'nothing'}."
        f"{nearest(name, logged)} Log it with self.log({name!r}, ...) in the step or hook that measures it."
    )


def better(value: float, than: float | None, mode: str, margin: float = 0.0) -> bool:
    """Whether ``value`` improves on ``than`` by more than ``margin``. NaN never does; anything improves on NaN or None."""
    if math.isnan(value):
        return False
    if than is None or math.isnan(than):
        return True
    return value < than - margin if mode == "min" else value > than + margin
