"""Read monitored metrics: identical on every rank and measured on the current weights."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any

from ..common.messages import nearest, warn

if TYPE_CHECKING:
    from ..trainer import Trainer

MODES = ("min", "max")


class LatestValidation:
    """Names that the latest validation logged, and the optimizer step it came after.

    A value of validation belongs to the weights it was measured on. A checkpoint of later weights must not be ranked by
    it.

    Attributes:
        step: Optimizer steps done at the latest validation; None before the first.
        names: The names it logged.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.names: frozenset[str] = frozenset()

    def end(self, trainer: Trainer) -> None:
        """Note the names and the step when a validation is over."""
        self.names = trainer.logbook.newest
        self.step = trainer.progress.step

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: a resumed run restores logged values, which must not count as new."""
        return {"step": self.step, "names": sorted(self.names)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.step, self.names = state_dict["step"], frozenset(state_dict["names"])

    def just_measured(self, trainer: Trainer) -> frozenset[str]:
        """Return the names whose values a validation of the current weights logged."""
        return self.names if self.step == trainer.progress.step else frozenset()

    def stale(self, trainer: Trainer) -> frozenset[str]:
        """Return the names whose values a validation of older weights logged."""
        return self.names if self.step != trainer.progress.step else frozenset()


def read_logged_metrics(trainer: Trainer, keep: Container[str] = ()) -> dict[str, float]:
    """Return every logged value, identical on every rank. Call it on all ranks.

    Args:
        trainer: The run's.
        keep: Names for which a step's value of the same name doesn't count, as validation has logged them since.
    """
    values = dict(trainer.logbook.callback_values)
    # The step values that loggers got may be log_every_n_steps old.
    world = trainer.accelerator.data_world
    steps = {entry.label("step"): value for entry, value in trainer.metrics.step_values(world)}
    return values | {name: value for name, value in steps.items() if name not in keep}


def read_monitored_metric(
    trainer: Trainer, name: str, consumer: str, strict: bool = True, keep: Container[str] = ()
) -> float | None:
    """Return the latest value of ``name``, identical on every rank. Call it on all ranks.

    Args:
        trainer: The run's.
        name: The logged name.
        consumer: What needs it, for the error, such as ``"the scheduler's monitor"``.
        strict: Raise for a name that was never logged; else return None.
        keep: See `read_logged_metrics`.

    Raises:
        ValueError: Lists what was logged.
    """
    values = read_logged_metrics(trainer, keep)
    if name not in values and strict:
        raise make_never_logged_error(trainer, name, consumer, values)
    return values.get(name)


def checks_at_epoch_end(trainer: Trainer) -> bool:
    """Return whether a monitored value is checked when epochs end, rather than after each validation.

    When an epoch ends, its training values can be watched as well as those of its one validation.
    """
    once = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
    return once or not trainer.has_validation


def read_new_value(trainer: Trainer, name: str, consumer: str, strict: bool = True) -> float | None:
    """Return the value of ``name`` for a check, identical on every rank; None if there is no new one. Call it on all.

    Args:
        trainer: The run's.
        name: The logged name.
        consumer: The class of the callback that checks, for messages.
        strict: Raise for a name that was never logged; else warn.

    Raises:
        ValueError: Lists what was logged.
    """
    watch = trainer.logbook.watch
    if name in watch.stale(trainer):
        return None
    values = read_logged_metrics(trainer, keep=watch.just_measured(trainer))
    value = values.get(name)
    if value is None and not (trainer.has_validation and watch.step is None):  # else no validation yet
        if strict:
            raise make_never_logged_error(trainer, name, f"{consumer}'s monitor", values)
        warn(f"{consumer}(strict=False) leaves out a check: {name!r} was never logged.")
    return value


def make_never_logged_error(trainer: Trainer, name: str, consumer: str, logged: Iterable[str]) -> ValueError:
    """Return the error for a name that was not logged, with the names that were."""
    names = sorted(logged)
    validation = "" if trainer.has_validation else " This run has no validation."
    if trainer.limit_val_batches and trainer.sources is not None and trainer.sources.empty("val"):
        validation += " Of its validation loaders at least one is empty."
    return ValueError(
        f"{consumer} {name!r} was never logged. Logged so far: {', '.join(names) or 'nothing'}.{nearest(name, names)}"
        f"{validation} Log it with self.log({name!r}, ...) in the step or hook that measures it."
    )


def is_better(value: float, than: float, mode: str, margin: float = 0.0) -> bool:
    """Return whether ``value`` improves on ``than`` by more than ``margin``.

    NaN never does, and anything improves on it.
    """
    if math.isnan(value):
        return False
    if math.isnan(than):
        return True
    return value < than - margin if mode == "min" else value > than + margin
