"""How a run stands, kept up to date for those who look at it from outside."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..best_effort import BestEffortCallback
from .html import Points
from .report import build_charts, describe_ending, find_best

if TYPE_CHECKING:
    from ...trainer import TaskModule, Trainer

Write = Callable[[Mapping[str, Any], Mapping[str, Mapping[str, Points]] | None], None]

_LONGEST = 2000  # characters of an error


class RunRecord(BestEffortCallback):
    """Tell ``write`` how the run stands: when a stage begins and ends, however it ends, and now and then in between.

    Rank zero does, but for an error, of which each process tells. What it tells of is on the host already, so nothing
    waits for a device or for other processes.

    Args:
        write: Takes facts by name, those that have changed; and charts of curves, or None where they have not.
        every_seconds: Seconds between two calls while a stage is under way, at least, and a hundred times as long as
            one takes.

    Attributes:
        began: Whether it came to training, or to another stage.
    """

    after_task = 3  # what others did at the same time is in it

    def __init__(self, write: Write, every_seconds: float = 3.0) -> None:
        self.every_seconds = every_seconds
        self.began = False
        self._write = write
        self._due = math.inf
        self._end: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """It runs."""
        super().setup(trainer, pl_module, stage)
        self._due, self._end = math.inf, {}
        self.began |= stage != "fit"
        if trainer.is_global_zero:
            facts = {"state": "running", "stage": stage, "ended": None, "note": None, "error": None}
            self._safely(
                self._write, {**facts, "task": type(pl_module).__name__, "processes": trainer.world_size}, None
            )

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """From here on there is something to tell."""
        if trainer.is_global_zero:
            self._safely(self._tell, trainer, {})

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """There is something left to train."""
        self.began = True

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Tell, if that is long ago: an epoch may take days."""
        if time.monotonic() >= self._due:
            self._safely(self._tell, trainer, {})

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Tell, if that is long ago."""
        if time.monotonic() >= self._due:
            self._safely(self._tell, trainer, {})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Tell, if that is long ago."""
        if time.monotonic() >= self._due:
            self._safely(self._tell, trainer, {})

    def on_exception(self, trainer: Trainer, pl_module: TaskModule, exception: BaseException) -> None:
        """Tell of the error at once, from every process: rank zero's may only follow from another's."""
        self._end = describe_error(exception)
        self._safely(self._write, self._end, None)

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Tell how it ended."""
        self._broken = False  # how it ended is worth another try
        if trainer.is_global_zero:
            end = self._end or {"state": "finished", "note": describe_ending(trainer, stage)}
            self._safely(self._tell, trainer, {**end, "ended": time.time()})
            self._due = math.inf

    def _tell(self, trainer: Trainer, facts: dict[str, Any]) -> None:
        began, progress = time.monotonic(), trainer.progress
        facts["metrics"] = dict(trainer.logbook.callback_values)
        charts = None
        if trainer.stage == "fit":  # another stage may run in a process of its own, which knows nothing of these
            charts = build_charts(trainer)
            facts |= {"steps": progress.step, "epochs": progress.epoch, "samples": progress.samples}
            facts["best"] = find_best(trainer)
        self._write(facts, charts)
        end_time = time.monotonic()
        self._due = end_time + max(self.every_seconds, 100 * (end_time - began))

    def _switch_off(self) -> None:
        self._due = math.inf


def describe_error(error: BaseException) -> dict[str, Any]:
    """What is to be told of a run that ``error`` ended."""
    from ...engine.preemption import Preempted  # which needs torch, and this is read without it

    if isinstance(error, KeyboardInterrupt):
        return {"state": "interrupted"}
    if isinstance(error, Preempted) and isinstance(error.code, int):
        return {"state": "interrupted", "note": signal.Signals(error.code - 128).name}
    text = f"{type(error).__name__}: {error}"
    return {"state": f"failed: {type(error).__name__}", "error": text[:_LONGEST]}
