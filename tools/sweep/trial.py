"""Callback in a trial's process that records the trial's value and prunes the trial."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...callbacks import is_better, make_never_logged_error, read_logged_metrics
from ...common.messages import announce, warn
from ...integrations import PruningCallback
from .assignment import Assignment
from .sweep_file import Metric
from .sweep_folder import DESCRIPTION

if TYPE_CHECKING:
    from ...trainer import TaskModule, Trainer
    from ...trainer.runs import RunFolder


def trial_of(folder: RunFolder) -> TrialCallback | None:
    """Return the callback that a sweep's trial needs; None if the sweep is unreadable."""
    if not isinstance(folder.path, Path):
        return None
    assignment = Assignment.read()
    if assignment is None or Path(assignment.folder) != folder.path:
        assignment = _read_assignment(folder.path)
    return None if assignment is None else TrialCallback(assignment, folder.record)


def _read_assignment(folder: Path) -> Assignment | None:
    """Return an assignment without a pruner for a trial that a user continues; None if ``sweep.json`` is unreadable."""
    try:
        metric = Metric(**json.loads((folder.parent / DESCRIPTION).read_text(encoding="utf-8"))["metric"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        warn(f"{folder.parent / DESCRIPTION} can't be read, so the value of trial {folder} is not recorded: {reason}")
        return None
    return Assignment(str(folder), os.getpid(), metric.name, metric.mode, metric.take)


class TrialCallback(PruningCallback):
    """Callback that records the metric of a sweep's trial and stops the trial if the study's pruner requests it.

    Unlike `PruningCallback`, this callback does not raise an exception to prune a trial. A pruned trial ends like a run
    that is stopped early.
    """

    after_task = 1  # before checkpoints are saved, which contain its state

    _first_epoch = 1  # number of completed epochs, in which min_resource and similar options are counted

    def __init__(self, assignment: Assignment, write: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__(None, assignment.metric)
        self._assignment, self._write = assignment, write
        self._value: float | None = None

    @property
    def state_key(self) -> str:
        """Key of the callback's state; see `Callback.state_key`."""
        return f"TrialCallback(monitor={self.monitor!r})"

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state; see `Callback.state_dict`."""
        return {**super().state_dict(), "value": self._value, "pruned": self.pruned}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the callback's state; see `Callback.load_state_dict`."""
        super().load_state_dict(state_dict)
        self._value, self.pruned = state_dict["value"], state_dict["pruned"]

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Reset the callback's state before ``fit`` and, with a pruner, open the study's trial on rank zero."""
        if stage == "fit":
            self._validations, self._value, self.pruned = 0, None, None
            with trainer.accelerator.world.failing_together():
                if trainer.is_global_zero:
                    self._trial = self._open_trial()

    def _open_trial(self) -> Any:
        assignment = self._assignment
        if not assignment.pruner:
            return None
        import optuna

        from .study import make_pruner, open_storage, open_trial, retry
        from .sweep_file import Choice

        options = dict(assignment.pruner)
        pruner = make_pruner(Choice(options.pop("type"), options))
        storage = open_storage(assignment.storage)
        study = retry(lambda: optuna.load_study(study_name=assignment.study, storage=storage, pruner=pruner))
        return open_trial(study, assignment.number)

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Stop a pruned trial that a sweep continues. A pruned trial that a user continues is not stopped."""
        if self.pruned is not None and self._assignment.pruner:
            self._prune(trainer)
        else:
            self.pruned = None

    def on_train_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Raise a ValueError if the metric was never logged."""
        if self._value is None:
            logged = read_logged_metrics(trainer)
            raise make_never_logged_error(trainer, self.monitor, "the sweep's metric", logged)

    def _ask_pruner(self, trainer: Trainer, value: float, number: int) -> bool:
        if self._trial is None:
            return False
        from optuna.exceptions import StorageInternalError

        from .study import retry

        try:
            retry(lambda: self._trial.report(value, number))
            # At the run's end there is nothing to save. Optuna, which counts from 0, does not get there either.
            return not _is_over(trainer) and bool(retry(self._trial.should_prune))
        except StorageInternalError as error:  # an error of the storage should not end the trial
            warn(f"the sweep's study can't be reached, so this trial continues without a pruning decision: {error}")
            return False

    def _note(self, trainer: Trainer, value: float, number: int) -> None:
        assignment = self._assignment
        if self._value is None or assignment.take == "last" or is_better(value, self._value, assignment.mode):
            self._value = value
        self._write({"objective": {"metric": self.monitor, "value": self._value, "mode": assignment.mode}})

    def _prune(self, trainer: Trainer) -> None:
        announce(f"{self.pruned}")
        trainer.should_stop = True

    def conclude(self) -> None:
        """Record "pruned" in the run's folder if the trial was pruned. Call this after ``fit`` has returned."""
        if self.pruned is not None:
            self._write({"state": "pruned", "note": self.pruned})


def _is_over(trainer: Trainer) -> bool:
    """Return whether the trial has reached its ``max_epochs`` or ``max_steps``."""
    epochs, steps = trainer.max_epochs, trainer.max_steps
    last_epoch = epochs is not None and 0 <= epochs <= trainer.current_epoch + 1 and trainer.progress.epoch_is_over
    return last_epoch or 0 <= steps <= trainer.global_step
