"""Checks of the settings that trigger a save, and a timer on which all ranks agree."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from ...common.validation import check_int

if TYPE_CHECKING:
    from ...trainer import Trainer


class AgreedInterval:
    """Timer on which all ranks agree without communicating at every step. It follows rank zero's clock.

    Args:
        interval: Time after which `is_over` returns True.

    Example:
        >>> from datetime import timedelta
        >>> from treadle.callbacks import AgreedInterval
        >>> interval = AgreedInterval(timedelta(minutes=10))
        >>> interval.restart(step=0)
        >>> interval.is_over(trainer)  # doctest: +SKIP
        False

        The last line is skipped because it needs a running Trainer. Call `is_over` in a callback's ``on_step_end``.
    """

    def __init__(self, interval: timedelta) -> None:
        self._interval = interval.total_seconds()

    def restart(self, step: int) -> None:
        """Start a new interval.

        Args:
            step: The current optimizer step.
        """
        self._began = self._looked = time.monotonic()
        self._looked_step, self._next_step = step, step + 1

    def is_over(self, trainer: Trainer) -> bool:
        """Return whether the interval has ended, and start the next one if so.

        Call `restart` first, and then this method on all ranks after each step.

        Args:
            trainer: The Trainer.
        """
        step = trainer.progress.step
        if step < self._next_step:
            return False
        current_time = time.monotonic()
        remaining_seconds = self._interval - (current_time - self._began)
        per_step = max((current_time - self._looked) / max(step - self._looked_step, 1), 1e-6)
        steps = trainer.accelerator.world.broadcast(
            0 if remaining_seconds <= 0 else max(1, int(remaining_seconds / 2 / per_step))
        )
        if not steps:
            self.restart(step)
            return True
        self._looked, self._looked_step, self._next_step = current_time, step, step + steps
        return False


def check_triggers(steps: int | None, interval: timedelta | None, epochs: int | None) -> None:
    """Raise a ValueError if more than one trigger is set, or if a number of steps or epochs is invalid.

    Args:
        steps: The argument ``every_n_train_steps``.
        interval: The parsed argument ``train_time_interval``.
        epochs: The argument ``every_n_epochs``.
    """
    for name, value in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
        if value is not None:
            check_int(name, value, 0, "means never")
    triggers = {"every_n_train_steps": steps, "train_time_interval": interval, "every_n_epochs": epochs}
    active_triggers = [name for name, value in triggers.items() if value or value is interval is not None]
    if len(active_triggers) > 1:
        raise ValueError(f"{' and '.join(active_triggers)} can't be combined. Use one ModelCheckpoint for each.")
