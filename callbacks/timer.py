"""Measure how long training takes, and stop it after a given time."""

from __future__ import annotations

import time
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ..common.durations import parse_duration
from ..common.messages import announce
from ..common.validation import check_bool, choose
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


_STAGES = ("train", "validate", "test")


class Interval(StrEnum):
    """When a `Timer` checks the time."""

    step = "step"
    epoch = "epoch"


class Timer(Callback):
    """Measures how long training takes, over all resumed runs, and stops it after ``duration``.

    It also knows how long the newest validation or test took: ask with their name, ``"validate"`` or ``"test"``.

    Where the processes' clocks differ they still stop after the same step. ``Trainer(max_time=...)`` stops too;
    a Timer can also be asked. A run that goes on when its time is over already takes no step.

    Args:
        duration: ``"DD:HH:MM:SS"``, a timedelta or a dict of its arguments; None only measures.
        interval: Look after each optimizer ``"step"``, or when an ``"epoch"`` ends.
        verbose: Say so when it stops the run.

    Raises:
        ValueError: For a duration that is not positive or in another form, and for an unknown interval.
        TypeError: For an argument of another type.
    """

    after_task = 1

    def __init__(
        self, duration: str | timedelta | dict[str, int] | None = None, interval: str = "step", verbose: bool = True
    ) -> None:
        self._limit = None if duration is None else parse_duration("duration", duration).total_seconds()
        self.interval = Interval(choose("interval", interval, tuple(map(str, Interval))))
        self.verbose = check_bool("verbose", verbose)
        self._before = 0.0  # seconds of training of the runs this one goes on from
        self._began: dict[str, float] = {}
        self._ended: dict[str, float] = {}

    def start_time(self, stage: str = "train") -> float | None:
        """When a stage began last, by ``time.monotonic()``; None if it did not."""
        return self._began.get(choose("stage", stage, _STAGES))

    def end_time(self, stage: str = "train") -> float | None:
        """When a stage ended last, by ``time.monotonic()``; None if it did not, or has begun anew."""
        return self._ended.get(choose("stage", stage, _STAGES))

    def time_elapsed(self, stage: str = "train") -> float:
        """Seconds spent in training so far; or those of the newest ``"validate"`` or ``"test"``."""
        began, before = self.start_time(stage), self._before if stage == "train" else 0.0
        if began is None:
            return before
        return before + self._ended.get(stage, time.monotonic()) - began

    def time_remaining(self, stage: str = "train") -> float | None:
        """Seconds until it stops the run, 0 once they are over; None without a duration."""
        return None if self._limit is None else max(0.0, self._limit - self.time_elapsed(stage))

    def _begin(self, stage: str) -> None:
        self._ended.pop(stage, None)
        self._began[stage] = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {"seconds": self.time_elapsed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        self._before = state_dict["seconds"]
        self._began.pop("train", None)
        self._ended.pop("train", None)

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Begin to count. Look: the time may be over already."""
        if "train" in self._ended:  # a fit after another one goes on counting
            self._before = self.time_elapsed()
        self._begin("train")
        if self.interval == "step" or not trainer.progress.batch:  # else the epoch is worked off first
            self._look(trainer)

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Look, if that happens after each step."""
        if self.interval == "step":
            self._look(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Look: an epoch that time is up for isn't begun."""
        self._look(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Keep the time."""
        self._ended["train"] = time.monotonic()

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """What an error has ended took time up to here."""
        for name in self._began:
            self._ended.setdefault(name, time.monotonic())

    def on_validation_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Begin to count the validation."""
        self._begin("validate")

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Keep its time."""
        self._ended["validate"] = time.monotonic()

    def on_test_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Begin to count the test."""
        self._begin("test")

    def on_test_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Keep its time."""
        self._ended["test"] = time.monotonic()

    def _look(self, trainer: Trainer) -> None:
        if self._limit is None or trainer.should_stop or self.time_elapsed() < self._limit:
            return
        trainer.should_stop = True
        if self.verbose:
            announce(f"the time is up: {timedelta(seconds=round(self.time_elapsed()))} of training")
