"""`Timer`: measures the duration of training and stops it after a given time."""

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
    """Interval at which a `Timer` checks the clock."""

    step = "step"
    epoch = "epoch"


class Timer(Callback):
    """Callback that measures training time across resumed runs and stops training after ``duration``.

    The callback also measures the duration of the latest validation and of the latest test. All processes stop after
    the same step. They do not stop before the Trainer's ``min_epochs`` and ``min_steps`` are reached. Another ``fit``
    with the same Timer continues the measurement.

    Args:
        duration: Time limit for training, as ``"DD:HH:MM:SS"``, a timedelta, or a dict of timedelta's arguments.
            Default: None, which only measures.
        interval: When to check the clock: after each optimizer step (``"step"``) or at the end of each epoch
            (``"epoch"``). Default: ``"step"``.
        verbose: Announce that the time is up. Default: True.

    Raises:
        ValueError, TypeError: If an argument is invalid.

    Examples:
        >>> import treadle as tl
        >>> from treadle.callbacks import Timer
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> timer = Timer(duration="00:01:00:00")
        >>> trainer = tl.Trainer(max_steps=1, accelerator="cpu", devices=1, barebones=True, callbacks=timer)
        >>> trainer.fit(BoringModel())
        >>> 0 < timer.time_elapsed() < 3600
        True
    """

    after_task = 1

    def __init__(
        self, duration: str | timedelta | dict[str, int] | None = None, interval: str = "step", verbose: bool = True
    ) -> None:
        self._limit = None if duration is None else parse_duration("duration", duration, zero=True).total_seconds()
        self.interval = Interval(choose("interval", interval, tuple(map(str, Interval))))
        self.verbose = check_bool("verbose", verbose)
        self._earlier_seconds = 0.0  # seconds of training of the runs that this one continues
        self._began: dict[str, float] = {}
        self._ended: dict[str, float] = {}

    def start_time(self, stage: str = "train") -> float | None:
        """Return the value of ``time.monotonic()`` when a stage last began; None if it never began.

        Args:
            stage: ``"train"``, ``"validate"`` or ``"test"``. Default: ``"train"``.

        Raises:
            ValueError: If ``stage`` is invalid.
        """
        return self._began.get(choose("stage", stage, _STAGES))

    def end_time(self, stage: str = "train") -> float | None:
        """Return the value of ``time.monotonic()`` when a stage last ended; None if it never ended or is running again.

        Args:
            stage: ``"train"``, ``"validate"`` or ``"test"``. Default: ``"train"``.

        Raises:
            ValueError: If ``stage`` is invalid.
        """
        return self._ended.get(choose("stage", stage, _STAGES))

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds spent in a stage: in training across resumed runs, or in the latest validation or test.

        Training time includes the time spent in validation.

        Args:
            stage: ``"train"``, ``"validate"`` or ``"test"``. Default: ``"train"``.

        Raises:
            ValueError: If ``stage`` is invalid.
        """
        began, earlier = self.start_time(stage), self._earlier_seconds if stage == "train" else 0.0
        if began is None:
            return earlier
        return earlier + self._ended.get(stage, time.monotonic()) - began

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the remaining seconds of ``duration``, or 0 if it has elapsed; None if ``duration`` is not set.

        Args:
            stage: Stage whose elapsed time is subtracted from ``duration``. Default: ``"train"``.

        Raises:
            ValueError: If ``duration`` is set and ``stage`` is invalid.
        """
        return None if self._limit is None else max(0.0, self._limit - self.time_elapsed(stage))

    def _begin(self, stage: str) -> None:
        self._ended.pop(stage, None)
        self._began[stage] = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state, which is the number of seconds spent in training."""
        return {"seconds": self.time_elapsed()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the seconds spent in training."""
        self._earlier_seconds = state_dict["seconds"]
        self._began.pop("train", None)
        self._ended.pop("train", None)

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Start the training clock. Stop the run if its time is already up."""
        if "train" in self._ended:  # another fit continues the count
            self._earlier_seconds = self.time_elapsed()
        self._begin("train")
        if self.interval == "step" or not trainer.progress.batch:  # otherwise a resumed epoch is completed first
            self._look(trainer)

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Stop the run if its time is up."""
        if self.interval == "step":
            self._look(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Stop the run if its time is up."""
        self._look(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Stop the training clock."""
        self._ended["train"] = time.monotonic()

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Stop the clocks of stages that an error interrupted."""
        for name in self._began:
            self._ended.setdefault(name, time.monotonic())

    def on_validation_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Start the validation clock."""
        self._begin("validate")

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Stop the validation clock."""
        self._ended["validate"] = time.monotonic()

    def on_test_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Start the test clock."""
        self._begin("test")

    def on_test_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Stop the test clock."""
        self._ended["test"] = time.monotonic()

    def _look(self, trainer: Trainer) -> None:
        if self._limit is None or trainer.should_stop or self.time_elapsed() < self._limit:
            return
        trainer.should_stop = True
        if self.verbose:
            announce(
                f"training stops: the time limit was reached after {timedelta(seconds=round(self.time_elapsed()))}"
            )
