"""Where logged numbers go: the dictionaries users read, and the loggers."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from ..callbacks.monitor import ValidationWatch
from ..engine import Metrics
from ..loggers import Logger, NullExperiment
from ..strategies import World, warn
from .datamodule import DataModule
from .history import History
from .task import TaskModule


class SilentLogger(Logger):
    """Takes everything, keeps nothing: what ``fast_dev_run`` puts in the place of the loggers."""

    @property
    def experiment(self) -> Any:
        """Answers every call."""
        return NullExperiment()

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Nothing is kept."""

    def log_hyperparams(self, params: Any, metrics: Any = None) -> None:
        """Nothing is kept."""


class Logbook:
    """Turns what was logged into numbers, over all processes, and passes them on.

    Args:
        world: all processes.
        data_world: those to reduce over.
        loggers: who gets the numbers, on rank zero. One that fails is left out from then on, with a warning: a side
            service does not end a training run.
        history: who gets them too, on all processes.

    Attributes:
        callback_values: by name, the newest agreed value of everything logged.
        bar_values: the same, of what the progress bar shows.
        logged_values: the same, of what the loggers got.
        newest: the names that the epoch or evaluation that ended last has logged.
        watch: what the newest validation within ``fit`` measured, and when.
    """

    def __init__(self, world: World, data_world: World, loggers: list[Logger], history: History) -> None:
        self.world = world
        self.data_world = data_world
        self.loggers = loggers
        self.history = history
        self.callback_values: dict[str, float] = {}
        self.bar_values: dict[str, float] = {}
        self.logged_values: dict[str, float] = {}
        self.newest: frozenset[str] = frozenset()
        self._failed: set[int] = set()
        self._epoch_row: dict[str, float] = {}
        self.watch = ValidationWatch()

    def write_step(self, metrics: Metrics, step: int, epoch: int) -> None:
        """Reduce the latest step's values and hand them to the loggers. All processes must call it."""
        row: dict[str, float] = {}
        for entry, value in metrics.step_values(self.data_world):
            name = entry.label("step")
            self.callback_values[name] = value
            if entry.prog_bar:
                self.bar_values[name] = value
            if entry.logger:
                row[name] = value
        self.write_row(row, step, epoch)

    def update_epoch(self, metrics: Metrics) -> dict[str, float]:
        """Reduce the epoch's values; returns them by name. All processes must call it."""
        found: dict[str, float] = {}
        names: set[str] = set()
        self._epoch_row = {}
        for entry, value in metrics.epoch_values(self.data_world):
            name = entry.label("epoch")
            found[name] = value
            names |= {name, entry.name}
            self.callback_values[name] = self.callback_values[entry.name] = value
            if entry.prog_bar:
                self.bar_values[name] = value
            if entry.logger:
                self._epoch_row[name] = value
        self.newest = frozenset(names)
        return found

    def keep_step_values(self, metrics: Metrics, newer: Container[str] = ()) -> None:
        """Agree on the epoch's last step values, for those who read them later. All processes must call it.

        Args:
            metrics: what training has logged.
            newer: names that a validation has logged since, which stay as they are.
        """
        for entry, value in metrics.step_values(self.data_world):
            name = entry.label("step")
            if name not in newer:
                self.callback_values[name] = value
                if entry.prog_bar:
                    self.bar_values[name] = value

    def state_dict(self) -> dict[str, Any]:
        """The agreed values: a scheduler, or a callback that monitors, may need one before it is logged again."""
        return {"values": dict(self.callback_values), "watch": self.watch.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.callback_values.clear()
        self.callback_values.update(state_dict["values"])
        self.watch.load_state_dict(state_dict["watch"])

    def note_epoch(self, step: int) -> None:
        """Let the history have the epoch's values before the loggers: a checkpoint is made in between."""
        self.history.add(self._epoch_row, step)

    def write_epoch(self, step: int, epoch: int) -> None:
        """Hand the epoch's values, as last updated, to the loggers."""
        self.write_row(self._epoch_row, step, epoch)

    def write_row(self, row: dict[str, float], step: int, epoch: int) -> None:
        """Hand a row of agreed values to the loggers, with the epoch beside them."""
        if not row:
            return
        self.logged_values.update(row)
        self.history.add(row, step)
        self.call("log_metrics", {"epoch": epoch, **row}, step=step)

    def call(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of every logger that works, on rank zero."""
        if not self.world.is_main:
            return
        for logger in self.loggers:
            if id(logger) in self._failed:
                continue
            try:
                getattr(logger, method)(*args, **kwargs)
            except Exception as error:
                self._failed.add(id(logger))
                warn(f"{type(logger).__name__}.{method} failed and gets nothing more: {type(error).__name__}: {error}")

    def clear(self) -> None:
        """Forget the values so far."""
        self.watch = ValidationWatch()
        self.callback_values.clear()
        self.bar_values.clear()
        self.logged_values.clear()

    def describe(self, task: TaskModule, datamodule: DataModule | None, hyperparameters: bool = True) -> None:
        """Tell the loggers what is about to be trained: hyperparameters, and the graph for those that want it."""
        for owner in (task, datamodule) if hyperparameters else ():
            if owner is not None and owner.hparams and owner.log_hyperparameters:
                self.call("log_hyperparams", dict(owner.hparams))
        self.call("log_graph", task)

    def agree_on_versions(self) -> None:
        """Give every process rank zero's version, and so one directory. All processes must call it."""
        if self.world.size == 1:
            return  # reading a version claims its directory; that can wait until something is logged
        # At once, as the other ranks may have no logger.
        own = [getattr(logger, "version", None) for logger in self.loggers] if self.world.is_main else None
        for logger, version in zip(self.loggers, self.world.broadcast(own), strict=False):
            if getattr(logger, "version", None) != version:
                logger.version = version

    def agree_on_directory(self, default: str) -> str:
        """The first logger's directory, rank zero's, on every process."""
        own = next((logger.log_dir for logger in self.loggers if logger.log_dir), default)
        return str(self.world.broadcast(own))
