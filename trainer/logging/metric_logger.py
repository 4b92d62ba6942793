"""Where logged numbers go: the dictionaries users read, and the loggers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import torch

from ...callbacks import LatestValidation
from ...common.messages import warn
from ...common.remote_path import as_path, is_url
from ...engine import Metrics
from ...loggers import EVALUATED_AT, Logger, NullExperiment, claim_version
from ...strategies import World
from ..core import DataModule, TaskModule
from .history import History


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

    def __getitem__(self, index: int) -> SilentLogger:
        return self

    def __getattr__(self, name: str) -> Any:
        # A method of the logger that it stands for: log_image, log_table, ...
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(NullExperiment(), name)


class Logbook:
    """Turns what was logged into numbers, over all processes, and passes them on.

    Args:
        world: All processes.
        data_world: Those to reduce over.
        loggers: Who gets the numbers, on rank zero. One that fails is left out from then on, with a warning: a side
            service does not end a training run.
        history: Who gets them too, on all processes.

    Attributes:
        callback_values: By name, the newest agreed value of everything logged.
        bar_values: The same, of what the progress bar shows.
        logged_values: The same, of what is for the loggers.
        evaluated: Batches of each validation loader that were worked through within ``fit``.
        newest: The names that the epoch or evaluation that ended last has logged.
        watch: What the newest validation within ``fit`` measured, and when.
        folder: The run's, once it was made because no logger has one.
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
        self.evaluated: list[int] = []
        self.folder: str | None = None
        self._failed: set[int] = set()
        self._written: set[int] = set()
        self._epoch_row: dict[str, float] = {}
        self.watch = LatestValidation()

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
        values: dict[str, float] = {}
        names: set[str] = set()
        self._epoch_row = {}
        for entry, value in metrics.epoch_values(self.data_world):
            name = entry.label("epoch")
            values[name] = value
            names |= {name, entry.name}
            self.callback_values[name] = self.callback_values[entry.name] = value
            if entry.prog_bar:
                self.bar_values[name] = value
            if entry.logger:
                self._epoch_row[name] = self.logged_values[name] = value
        self.newest = frozenset(names)
        return values

    def write_batches(self, metrics: Metrics, counts: list[int], step: int, *, keep_counting: bool) -> None:
        """Hand the loggers what the single batches of an evaluation logged. All processes must call it.

        Their x-axis is the number of the loader's batches, as the step stays the same in an evaluation. The optimizer
        steps done are in the row.

        Args:
            metrics: What the evaluation has logged.
            counts: Batches of each loader.
            step: Optimizer steps done.
            keep_counting: Go on counting from evaluation to evaluation, as in ``fit``.
        """
        before = self.evaluated if keep_counting else []
        before = before + [0] * (len(counts) - len(before))
        for (loader, batch), values in metrics.batch_values(self.data_world):
            row: dict[str, float] = {}
            for entry, value in values:
                name = entry.label("step")
                if entry.prog_bar:
                    self.bar_values[name] = value
                if entry.logger:
                    row[name] = value
            if row:
                self.logged_values.update(row)
                self.call("log_metrics", {EVALUATED_AT: step, **row}, step=before[loader] + batch + 1)
        if keep_counting:
            self.evaluated = [previous + count for previous, count in zip(before, counts, strict=False)]

    def keep_step_values(self, metrics: Metrics, newer: Container[str] = ()) -> None:
        """Agree on the epoch's last step values, for those who read them later. All processes must call it.

        Args:
            metrics: What training has logged.
            newer: Names that a validation has logged since, which stay as they are.
        """
        for entry, value in metrics.step_values(self.data_world):
            name = entry.label("step")
            if name not in newer:
                self.callback_values[name] = value
                if entry.prog_bar:
                    self.bar_values[name] = value
                if entry.logger:
                    self.logged_values[name] = value

    def state_dict(self) -> dict[str, Any]:
        """The agreed values: a scheduler, or a callback that monitors, may need one before it is logged again."""
        values, watch = dict(self.callback_values), self.watch.state_dict()
        return {"values": values, "watch": watch, "evaluated": list(self.evaluated)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.callback_values.clear()
        self.callback_values.update(state_dict["values"])
        self.watch.load_state_dict(state_dict["watch"])
        self.evaluated = list(state_dict.get("evaluated", ()))

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
            self._use(logger, method, partial(getattr(logger, method), *args, **kwargs))
            if method == "log_metrics" and logger.saves_each_row and id(logger) not in self._failed:
                self._use(logger, "save", logger.save)
            if method == "log_metrics":
                self._written.add(id(logger))

    def _use(self, logger: Logger, action: str, use: Callable[[], Any]) -> None:
        try:
            use()
        except Exception as error:
            if logger.strict:
                raise
            self._failed.add(id(logger))
            warn(f"{type(logger).__name__}.{action} failed and gets nothing more: {type(error).__name__}: {error}")

    def places(self) -> list[str]:
        """Where rank zero's loggers have written metrics: a directory, or the run of a service."""
        # Not of others: to ask a logger that has written nothing for its directory claims one.
        written = [logger for logger in self.loggers if id(logger) in self._written - self._failed]
        places = (logger.log_dir or f"{type(logger).__name__}, {logger.name}/{logger.version}" for logger in written)
        return list(dict.fromkeys(map(str, places)))

    def clear(self) -> None:
        """Forget the values so far."""
        self.watch = LatestValidation()
        self.callback_values.clear()
        self.bar_values.clear()
        self.logged_values.clear()

    def describe(self, task: TaskModule, datamodule: DataModule | None, hyperparameters: bool = True) -> None:
        """Tell the loggers what is about to be trained: hyperparameters, and the graph for those that want it.

        Raises:
            ValueError: For a hyperparameter of which the task and the data module say different things.
        """
        merged: dict[str, Any] = {}
        for owner in (task, datamodule) if hyperparameters and self.loggers else ():
            if owner is not None and owner.log_hyperparameters:
                hparams = owner.plain_hparams()
                if differs := [
                    name for name in hparams if name in merged and repr(merged[name]) != repr(hparams[name])
                ]:
                    name = differs[0]
                    raise ValueError(
                        f"hyperparameter {name!r}: {type(task).__name__} has {merged[name]!r:.100}, "
                        f"{type(owner).__name__} {hparams[name]!r:.100}, and loggers keep one value of a name. Rename "
                        f"one, or leave it out with save_hyperparameters(ignore=[{name!r}]) or (logger=False)."
                    )
                merged |= hparams
        if merged:
            self.call("log_hyperparams", merged)
        self.call("log_graph", task)

    def agree_on_versions(self) -> None:
        """Give every process rank zero's version, and so one directory. All processes must call it."""
        if self.world.size == 1:
            return  # reading a version claims its directory; that can wait until something is logged
        # At once, as the other ranks may have no logger.
        versions = [getattr(logger, "version", None) for logger in self.loggers] if self.world.is_main else None
        for logger, version in zip(self.loggers, self.world.broadcast(versions), strict=False):
            if getattr(logger, "version", None) != version:
                logger.version = version

    def agree_on_directory(self, root: str) -> str:
        """Return the run's folder, rank zero's, on every process. All processes must call it."""
        folder = self.world.broadcast(self.directory(root) if self.world.is_main else None)
        if folder != root and not any(logger.log_dir for logger in self.loggers):
            self.folder = folder
        return str(folder)

    def directory(self, root: str) -> str:
        """Return the run's folder. For rank zero.

        It is the first logger's. Where none has one, as with MLflow, it is made below ``root``, once for this logbook,
        so that no two runs share it; without a logger it is ``root`` itself.
        """
        folder = next((logger.log_dir for logger in self.loggers if logger.log_dir), self.folder)
        if folder is None and self.loggers and not isinstance(self.loggers[0], SilentLogger):
            folder = self.folder = self._make_folder(root)
        return root if folder is None else str(folder)

    def folder_of_runs(self, root: str) -> str:
        """Where the folders of runs stand whose loggers have none: in ``root``, named after the experiment."""
        return str(as_path(root) / (_make_file_name(self.loggers[0].name) or "treadle_logs"))

    def existing_folder(self, root: str) -> str | None:
        """The run's folder where no logger has one, as far as it is known without beginning a run. For rank zero."""
        logger = self.loggers[0]
        if self.folder is None and type(logger).version is Logger.version and isinstance(logger.version, str):
            return str(as_path(self.folder_of_runs(root)) / _make_file_name(logger.version))
        return self.folder

    def _make_folder(self, root: str) -> str | None:
        """A folder named by the run's id where a service has given it one; else by the next free number."""
        logger = self.loggers[0]
        if type(logger).version is Logger.version and logger.version is None:  # one of its own may never change
            self._use(logger, "experiment", lambda: logger.experiment)  # which begins the run
        try:
            folder = self.existing_folder(root)
            if folder is None:
                above = self.folder_of_runs(root)
                return str(as_path(above) / f"version_{claim_version(above)}")
            if not is_url(folder):
                os.makedirs(folder, exist_ok=True)
            return folder
        except OSError as error:
            warn(f"{root} can't hold this run's folder: {error}")
            return None


def tensors_by_name(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return numbers as tensors, as scripts written for Lightning expect them."""
    return {
        name: torch.as_tensor(value, dtype=torch.get_default_dtype(), device="cpu") for name, value in values.items()
    }


def _make_file_name(name: str | None) -> str:
    """A name without what would lead into another folder, as the ``/`` of Databricks' experiments would."""
    return re.sub(r"[^\w.=@+-]+", "_", name or "").strip("._")
