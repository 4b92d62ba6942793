"""`RunRecord`: reports the current state of a run to observers outside of the process."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...common import messages
from ..best_effort import BestEffortCallback
from .html import Points
from .report import build_charts, collect_hyperparameters, describe_ending, find_best, split_settings

if TYPE_CHECKING:
    from ...trainer import TaskModule, Trainer

Write = Callable[[Mapping[str, Any], Mapping[str, Mapping[str, Points]] | None], None]

_LONGEST = 2000  # characters of an error


class RunRecord(BestEffortCallback):
    """Callback that reports the run's state when a stage begins, ends or fails, and at intervals during training.

    Only rank zero reports, except that every process reports an error. Each report calls ``write`` with the entries to
    report, by name, and the charts of `build_charts`. The charts are None if they are not reported.

    Attributes:
        began: Whether the first training epoch, or a stage other than ``fit``, has begun.
    """

    after_task = 3  # after the other callbacks, whose results it reports

    def __init__(self, write: Write, every_seconds: float = 3.0) -> None:
        self.every_seconds = every_seconds
        self.began = False
        self._write = write
        self._due = math.inf
        self._end: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Report that a stage is running."""
        super().setup(trainer, pl_module, stage)
        self._due, self._end = math.inf, {}
        self.began |= stage != "fit"
        if trainer.is_global_zero:
            facts = {"state": "running", "stage": stage, "ended": None, "note": None, "error": None}
            self._safely(
                self._write, {**facts, "task": type(pl_module).__name__, "processes": trainer.world_size}, None
            )

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Report the hyperparameters, the Trainer's flags and the state before the first step."""
        if trainer.is_global_zero:
            changed, _ = split_settings(trainer)
            owners = {"task": pl_module, "data": trainer.datamodule}
            hyperparameters = {
                f"{owner}.{name}": text
                for owner, module in owners.items()
                for name, text in collect_hyperparameters(module).items()
            }
            self._safely(self._report_state, trainer, {"hyperparameters": hyperparameters, "flags": changed})

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Record that training has begun."""
        self.began = True

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Report the run's state if a report is due."""
        if time.monotonic() >= self._due:
            self._safely(self._report_state, trainer, {})

    on_validation_end = on_train_epoch_end = on_step_end

    def on_exception(self, trainer: Trainer, pl_module: TaskModule, exception: BaseException) -> None:
        """Report the error on every rank."""
        self._end = describe_error(exception)
        self._safely(self._write, self._end, None)

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Report the outcome of the stage."""
        self._broken = False  # try to report the end, even after an error
        if trainer.is_global_zero:
            end = self._end or {"state": "finished", "note": describe_ending(trainer, stage)}
            self._safely(self._report_state, trainer, {**end, "ended": time.time()})
            self._due = math.inf

    def _report_state(self, trainer: Trainer, facts: dict[str, Any]) -> None:
        """Report the entries in ``facts`` and the metrics and, in ``fit``, the progress and the charts."""
        began, progress = time.monotonic(), trainer.progress
        facts["metrics"] = dict(trainer.logbook.callback_values)
        charts = None
        if trainer.stage == "fit":  # another stage may run in a process that does not have them
            charts = build_charts(trainer)
            facts |= {"steps": progress.step, "epochs": progress.epoch, "samples": progress.samples}
            facts["best"] = find_best(trainer)
            facts["digests"] = {str(step): digest for step, digest in trainer.accelerator.weight_digests.items()}
        self._write(facts, charts)
        end_time = time.monotonic()
        self._due = end_time + max(self.every_seconds, 100 * (end_time - began))

    def _switch_off(self) -> None:
        self._due = math.inf


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return the entries to report for an error."""
    from ...engine.preemption import Preempted  # imports torch, which this file must not

    if isinstance(error, KeyboardInterrupt):
        return {"state": "interrupted"}
    if isinstance(error, Preempted) and isinstance(error.code, int):
        return {"state": "interrupted", "note": signal.Signals(error.code - 128).name}
    text = messages.describe_error(error)
    return {"state": f"failed: {type(error).__name__}", "error": text[:_LONGEST]}
