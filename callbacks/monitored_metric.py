"""Reading a logged value that a decision hangs on: the same on every process, and measured on the weights at hand."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any

from ..common.messages import nearest

if TYPE_CHECKING:
    from ..trainer import Trainer

MODES = ("min", "max")


class ValidationWatch:
    """Remembers which names the newest validation logged, and after which optimizer step.

    A value of validation belongs to the weights it was measured on; some steps later it says nothing about the newer
    ones, and a checkpoint ranked by it would be ranked by another one's value.

    Attributes:
        step: optimizer steps done at the newest validation; None before the first.
        names: what it logged.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.names: frozenset[str] = frozenset()

    def end(self, trainer: Trainer) -> None:
        """Call it when a validation is over."""
        self.names = trainer.logbook.newest
        self.step = trainer.progress.step

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know: what is logged comes back with it, and would count as new."""
        return {"step": self.step, "names": sorted(self.names)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.step, self.names = state_dict["step"], frozenset(state_dict["names"])

    def just_measured(self, trainer: Trainer) -> frozenset[str]:
        """The names whose values a validation of the present weights logged."""
        return self.names if self.step == trainer.progress.step else frozenset()

    def stale(self, trainer: Trainer) -> frozenset[str]:
        """The names whose values a validation of older weights logged."""
        return self.names if self.step != trainer.progress.step else frozenset()


def logged_values(trainer: Trainer, keep: Container[str] = ()) -> dict[str, float]:
    """Everything logged, the same on every process. All processes must ask.

    Args:
        trainer: whose logged values are meant.
        keep: names for which a step's value of the same name doesn't count, as validation has logged them since.
    """
    values = dict(trainer.logbook.callback_values)
    # What the loggers got of a step's values may be log_every_n_steps old.
    world = trainer.accelerator.data_world
    steps = {entry.label("step"): value for entry, value in trainer.metrics.step_values(world)}
    return values | {name: value for name, value in steps.items() if name not in keep}


def monitored_value(
    trainer: Trainer, name: str, who: str, strict: bool = True, keep: Container[str] = ()
) -> float | None:
    """The newest value of ``name``, the same on every process. All processes must ask.

    Args:
        trainer: whose logged values are meant.
        name: the logged name.
        who: who asks, for the error, such as ``"the scheduler's monitor"``.
        strict: whether a name that was never logged is an error; else the answer is None.
        keep: see `logged_values`.

    Raises:
        ValueError: lists what was logged.
    """
    values = logged_values(trainer, keep)
    if name not in values and strict:
        raise never_logged(trainer, name, who, values)
    return values.get(name)


def never_logged(trainer: Trainer, name: str, who: str, logged: Iterable[str]) -> ValueError:
    """The error for a name that was not logged, with those that were."""
    names = sorted(logged)
    validation = "" if trainer.has_validation else " This run has no validation."
    if trainer.limit_val_batches and trainer.sources is not None and trainer.sources.empty("val"):
        validation += " Of its validation loaders at least one is empty."
    return ValueError(
        f"{who} {name!r} was never logged. Logged so far: {', '.join(names) or 'nothing'}.{nearest(name, names)}"
        f"{validation} Log it with self.log({name!r}, ...) in the step or hook that measures it."
    )


def better(value: float, than: float, mode: str, margin: float = 0.0) -> bool:
    """Whether ``value`` improves on ``than`` by more than ``margin``. NaN never does, and anything improves on it."""
    if math.isnan(value):
        return False
    if math.isnan(than):
        return True
    return value < than - margin if mode == "min" else value > than + margin
