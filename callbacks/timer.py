"""Measure how long training takes, and stop it after a given time."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..strategies import announce, choose
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class Timer(Callback):
    """Measures how long training takes, over all resumed runs, and stops it after ``duration``.

    Where the processes' clocks differ they still stop after the same step. ``Trainer(max_time=...)`` stops too;
    a Timer can also be asked.

    Args:
        duration: ``"DD:HH:MM:SS"``, a timedelta or a dict of its arguments; None only measures.
        interval: look after each optimizer ``"step"``, or when an ``"epoch"`` ends.
        verbose: say so when it stops the run.

    Raises:
        ValueError: for a duration or an interval that is none.
    """

    after_task = 1

    def __init__(
        self, duration: str | timedelta | dict[str, int] | None = None, interval: str = "step", verbose: bool = True
    ) -> None:
        self._limit = None if duration is None else _seconds(duration)
        self.interval = choose("interval", interval, ("step", "epoch"))
        self.verbose = verbose
        self._before = 0.0  # seconds of the runs this one goes on from
        self._began: float | None = None

    def time_elapsed(self) -> float:
        """Seconds spent in training so far."""
        return self._before + (0.0 if self._began is None else time.monotonic() - self._began)

    def time_remaining(self) -> float | None:
        """Seconds until it stops the run, 0 once they are over; None without a duration."""
        return None if self._limit is None else max(0.0, self._limit - self.time_elapsed())

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {"seconds": self.time_elapsed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        self._before = state_dict["seconds"]

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Begin to count."""
        self._began = time.monotonic()

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Look, if that happens after each step."""
        if self.interval == "step":
            self._look(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Look: an epoch that time is up for isn't begun."""
        self._look(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Keep the time."""
        self._before, self._began = self.time_elapsed(), None

    def _look(self, trainer: Trainer) -> None:
        if self._limit is None or trainer.should_stop or self.time_elapsed() < self._limit:
            return
        trainer.should_stop = True
        if self.verbose:
            announce(f"the time is up: {timedelta(seconds=round(self.time_elapsed()))} of training")


def _seconds(duration: str | timedelta | dict[str, int]) -> float:
    if isinstance(duration, str):
        parts = re.fullmatch(r"(\d+):(\d+):(\d+):(\d+)", duration.strip())
        if parts is None:
            raise ValueError(f"duration={duration!r} must be written as DD:HH:MM:SS.")
        duration = dict(zip(("days", "hours", "minutes", "seconds"), map(int, parts.groups()), strict=True))
    try:
        length = timedelta(**duration) if isinstance(duration, dict) else duration
        return length.total_seconds()
    except (TypeError, AttributeError):
        raise ValueError(
            f"duration={duration!r} must be DD:HH:MM:SS, a timedelta or a dict of its arguments."
        ) from None
