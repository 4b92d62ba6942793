"""Logged values that callbacks and schedulers monitor."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

from ..common.messages import nearest, warn

if TYPE_CHECKING:
    from ..trainer import Trainer

MODES = ("min", "max")


class NeverLoggedError(ValueError, RuntimeError):
    """Error about a monitored name that was never logged.

    Lightning raises a RuntimeError in EarlyStopping and a MisconfigurationException, here ValueError, elsewhere.
    """


def read_logged_metrics(trainer: Trainer, keep: Container[str] = ()) -> dict[str, float]:
    """Return the latest available value of each logged name, identical on every rank. Must be called on all ranks.

    Args:
        trainer: The Trainer.
        keep: Names for which the latest training step's value is ignored. Default: none.
    """
    # The step values that loggers got may be log_every_n_steps old.
    steps = {entry.label("step"): value for entry, value in trainer.logbook.agree_on_step_values(trainer.metrics)}
    values = dict(trainer.logbook.callback_values)
    return values | {name: value for name, value in steps.items() if name not in keep}


def read_monitored_metric(
    trainer: Trainer, name: str, consumer: str, strict: bool = True, keep: Container[str] = ()
) -> float | None:
    """Return the latest value of ``name``, identical on every rank. Must be called on all ranks.

    Args:
        trainer: The Trainer.
        name: The logged name.
        consumer: Words that precede the name in the error message, such as ``"the scheduler's monitor"``.
        strict: Raise an error if the name was never logged, instead of returning None. Default: True.
        keep: Names for which the latest training step's value is ignored. Default: none.

    Raises:
        NeverLoggedError: If the name was never logged and ``strict`` is set.
    """
    values = read_logged_metrics(trainer, keep)
    if name not in values and strict:
        raise make_never_logged_error(trainer, name, consumer, values)
    return values.get(name)


def checks_at_epoch_end(trainer: Trainer) -> bool:
    """Return whether a monitored value is checked at the end of epochs rather than after each validation.

    Args:
        trainer: The Trainer.
    """
    once = validates_at_epoch_ends(trainer) and trainer.check_val_every_n_epoch == 1
    return once or not trainer.has_validation


def validates_at_epoch_ends(trainer: Trainer) -> bool:
    """Return whether validation, if there is one, runs only at the end of epochs.

    Args:
        trainer: The Trainer.
    """
    interval = trainer.val_check_interval  # 1.0 is an epoch, 1 is a batch
    return isinstance(interval, float) and interval == 1.0 and trainer.val_check_seconds is None


def read_new_value(trainer: Trainer, name: str, consumer: str, strict: bool = True) -> float | None:
    """Return a monitored value, unless a validation measured it on earlier weights. Must be called on all ranks.

    Args:
        trainer: The Trainer.
        name: The logged name.
        consumer: Class name of the callback that checks the value, for messages.
        strict: Raise an error if the name was never logged, instead of issuing a warning. In a run with validation,
            neither happens before the first validation is complete. Default: True.

    Returns:
        The value, identical on every rank; None if no new value is available.

    Raises:
        NeverLoggedError: If ``strict`` is set and the name was never logged.
    """
    validation = trainer.logbook.latest_validation
    if name in validation.stale(trainer):
        return None
    values = read_logged_metrics(trainer, keep=validation.just_measured(trainer))
    value = values.get(name)
    is_pending = trainer.has_validation and validation.step is None  # no validation has run yet
    if value is None and not is_pending:
        if strict:
            raise make_never_logged_error(trainer, name, f"{consumer}'s monitor", values)
        warn(f"{consumer}(strict=False) skips a check, because {name!r} was never logged.")
    return value


def make_never_logged_error(trainer: Trainer, name: str, consumer: str, logged: Iterable[str]) -> NeverLoggedError:
    """Return the error for a name that was never logged.

    Args:
        trainer: The Trainer.
        name: The name.
        consumer: Words that precede the name in the error message, such as ``"the scheduler's monitor"``.
        logged: Names that were logged.
    """
    names = sorted(logged)
    validation = "" if trainer.has_validation else " This run has no validation."
    if trainer.limit_val_batches and trainer.sources is not None and trainer.sources.empty("val"):
        validation += " At least one validation dataloader is empty."
    elif validation and name.startswith("val"):
        fix = "Pass a validation dataloader to fit"
        if not trainer.limit_val_batches:
            fix = "Remove limit_val_batches=0"
        elif trainer.sources is not None and trainer.sources.evaluation("val"):
            fix = "Define validation_step"
        other = f", or monitor a logged value: {', '.join(names)}." if names else "."
        return NeverLoggedError(
            f"{consumer} {name!r} was never logged, because this run has no validation. {fix}{other}"
        )
    of_validation = [n for n in names if not (name.startswith("val") and n.startswith("train"))]
    hint = explain_returned(trainer, name) or nearest(name, of_validation)
    return NeverLoggedError(
        f"{consumer} {name!r} was never logged. Logged so far: {', '.join(names) or 'nothing'}.{hint}"
        f"{validation} Call self.log({name!r}, ...) in the step or hook that measures the value."
    )


def explain_returned(trainer: Trainer, name: str) -> str:
    """Return a sentence if an evaluation step returned a value under a name instead of logging it; otherwise ``""``.

    Args:
        trainer: The Trainer.
        name: Name of the value.
    """
    if name not in trainer.logbook.returned:
        return ""
    return f" A step returned a dict with {name!r}, but returned values are not logged."


def is_better(value: float, than: float, mode: str, margin: float = 0.0) -> bool:
    """Return whether ``value`` improves on ``than`` by more than ``margin``. NaN is worse than any number.

    Args:
        value: The new value.
        than: The value to compare with.
        mode: ``"min"`` if lower values are better, ``"max"`` if higher values are better.
        margin: Difference that an improvement must exceed. Default: 0.0.
    """
    if math.isnan(value):
        return False
    if math.isnan(than):
        return True
    return value < than - margin if mode == "min" else value > than + margin
