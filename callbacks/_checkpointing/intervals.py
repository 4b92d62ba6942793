"""When to save: so many steps, so many epochs, or so much time."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from ...common.validation import check_int

if TYPE_CHECKING:
    from ...trainer import Trainer


class AgreedInterval:
    """Tells when an interval is over, by rank zero's clock, without asking at every step.

    A question to another process costs as much as a small step. So rank zero guesses how many steps half of what is
    left will take, all processes take those, and then look again: some ten looks per interval, however long.
    """

    def __init__(self, interval: timedelta) -> None:
        self._interval = interval.total_seconds()

    def restart(self, step: int) -> None:
        """The interval begins."""
        self._began = self._looked = time.monotonic()
        self._looked_step, self._next_step = step, step + 1

    def is_over(self, trainer: Trainer) -> bool:
        """Whether it is over; then the next one begins. All processes must ask after each step."""
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
    """Raise ValueError for triggers that exclude each other or are not whole numbers."""
    for name, value in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
        if value is not None:
            check_int(name, value, 0, "means never")
    triggers = {"every_n_train_steps": steps, "train_time_interval": interval, "every_n_epochs": epochs}
    active_triggers = [name for name, value in triggers.items() if value]
    if len(active_triggers) > 1:
        raise ValueError(f"{' and '.join(active_triggers)} exclude each other; use one ModelCheckpoint for each.")
