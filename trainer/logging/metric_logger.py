"""Destinations of logged values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...common.messages import describe_error, warn
from ...common.remote_path import as_path, is_url
from ...engine import Accelerator, Entry, Metrics
from ...engine.metrics import ExactMetrics, MutedMetrics, is_wide
from ...loggers import EVALUATED_AT, DirectoryLogger, Logger, NullExperiment, claim_version
from ...strategies import World
from ..core import DataModule, TaskModule
from .history import History

if TYPE_CHECKING:
    from ..trainer import Trainer


class SilentLogger(Logger):
    """Logger that accepts every call and stores nothing."""

    @property
    def experiment(self) -> Any:
        """Object that accepts every call."""
        return NullExperiment()

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def __getitem__(self, index: int) -> SilentLogger:
        return self

    def __getattr__(self, name: str) -> Any:
        # Methods of the replaced logger: log_image, log_table, ...
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(NullExperiment(), name)


class LatestValidation:
    """Names that the latest validation logged, and the optimizer step of that validation.

    The values logged under these names must not be used to rank a checkpoint of later weights.

    Attributes:
        step: Number of optimizer steps taken before the latest validation; None before the first validation.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.names: frozenset[str] = frozenset()

    def end(self, trainer: Trainer) -> None:
        """Record the logged names and the optimizer step after a validation.

        Args:
            trainer: The Trainer.
        """
        self.names = trainer.logbook.epoch_names
        self.step = trainer.progress.step

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints."""
        return {"step": self.step, "names": sorted(self.names)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Args:
            state_dict: The saved state.
        """
        self.step, self.names = state_dict["step"], frozenset(state_dict["names"])

    def just_measured(self, trainer: Trainer) -> frozenset[str]:
        """Return the names logged by the latest validation, or an empty set if the weights have changed since then.

        Args:
            trainer: The Trainer.
        """
        return self.names if self.step == trainer.progress.step else frozenset()

    def stale(self, trainer: Trainer) -> frozenset[str]:
        """Return the names logged by the latest validation, or an empty set if it ran on the current weights.

        Args:
            trainer: The Trainer.
        """
        return self.names if self.step != trainer.progress.step else frozenset()


class Logbook:
    """Store of logged values, which reduces them over the processes and sends them to the loggers and the history.

    A logger that fails is disabled with a warning, unless it is strict, because a tracking service must not end a
    training run.

    Args:
        world: All processes.
        data_world: Processes over which values are reduced.
        loggers: Loggers that receive the values, on rank zero.
        history: History that receives the values.

    Attributes:
        callback_values: The latest reduced values, by name.
        bar_values: The latest reduced values for the progress bar, by name.
        logged_values: The latest values for the loggers, by name.
        agreed_names: Names under which the user of any rank wrote numbers into ``callback_metrics``.
        other_values: Objects other than numbers that the user wrote into ``callback_metrics``, by name.
        wide: Names whose values may have more than float32's precision; see `Entry`.
        evaluated: Number of batches processed from each validation dataloader within ``fit``.
        epoch_names: Names of the epoch values in the latest `update_epoch`, with and without the suffix ``_epoch``.
        latest_validation: The names that the latest validation within ``fit`` logged, and its optimizer step.
        returned: Names in the dicts that evaluation steps returned, for messages, because these values are not logged.
        folder: The run's folder if one was created because no logger has one; otherwise None.
    """

    def __init__(self, world: World, data_world: World, loggers: list[Logger], history: History) -> None:
        self.world = world
        self.data_world = data_world
        self.loggers = loggers
        self.history = history
        self.callback_values: dict[str, float] = {}
        self.bar_values: dict[str, float] = {}
        self.logged_values: dict[str, float] = {}
        self.other_values: dict[str, Any] = {}
        self.wide: set[str] = set()
        self._written_names: set[str] = set()  # by this rank's user
        self.agreed_names: set[str] = set()
        self.epoch_names: frozenset[str] = frozenset()
        self.evaluated: list[int] = []
        self.returned: set[Any] = set()
        self.folder: str | None = None
        self._failed: set[int] = set()
        self._written: set[int] = set()
        self._epoch_row: dict[str, float] = {}
        self.latest_validation = LatestValidation()

    def __getstate__(self) -> dict[str, Any]:  # for copies of the Trainer, in any process
        return {**vars(self), "world": None, "data_world": None, "_failed": set(), "_written": set()}

    def move_to(self, accelerator: Accelerator) -> None:
        """Reduce values over the processes of an Accelerator from now on.

        Args:
            accelerator: The Accelerator.
        """
        self.world, self.data_world = accelerator.world, accelerator.data_world
        self.history.use(accelerator.cursor)

    def write_step(self, metrics: Metrics, step: int, epoch: int) -> None:
        """Reduce the latest step's values and send them to the loggers. Call it on all processes.

        Args:
            metrics: Values logged in training.
            step: Number of optimizer steps.
            epoch: Index of the epoch.
        """
        row: dict[str, float] = {}
        for entry, value in metrics.step_values(self.data_world):
            self._keep(entry, entry.label("step"), value, row)
        self.write_row(row, step, epoch)

    def _keep(self, entry: Entry, name: str, value: float, row: dict[str, float]) -> None:
        """Keep a reduced value under a name, and add it to ``row`` if it is for the loggers."""
        self.callback_values[name] = value
        if entry.wide:
            self.wide.add(name)
        if entry.prog_bar:
            self.bar_values[name] = value
        if entry.logger:
            row[name] = value

    def update_epoch(self, metrics: Metrics) -> dict[str, float]:
        """Reduce the epoch's values and return them by name. Call it on all processes.

        Args:
            metrics: Values logged in the epoch or the evaluation.
        """
        values: dict[str, float] = {}
        names: set[str] = set()
        self._epoch_row = {}
        for entry, value in metrics.epoch_values(self.data_world):
            name = entry.label("epoch")
            values[name] = self.callback_values[entry.name] = value
            names |= {name, entry.name}
            if entry.wide:
                self.wide.add(entry.name)
            self._keep(entry, name, value, self._epoch_row)
        self.logged_values.update(self._epoch_row)
        self.epoch_names = frozenset(names)
        return values

    def write_batches(self, metrics: Metrics, counts: list[int], step: int, *, keep_counting: bool) -> None:
        """Send the values that single batches of an evaluation logged to the loggers. Call it on all processes.

        Their x-axis counts batches, because the optimizer step is constant in an evaluation.

        Args:
            metrics: Values logged in the evaluation.
            counts: Number of batches processed from each dataloader.
            step: Number of optimizer steps.
            keep_counting: Continue the count across evaluations.
        """
        offsets = self.evaluated if keep_counting else []
        offsets = offsets + [0] * (len(counts) - len(offsets))
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
                self.call_loggers("log_metrics", {EVALUATED_AT: step, **row}, step=offsets[loader] + batch + 1)
        if keep_counting:
            self.evaluated = [previous + count for previous, count in zip(offsets, counts, strict=False)]

    def keep_step_values(self, metrics: Metrics, newer: Container[str] = ()) -> None:
        """Keep the reduced values of the latest step. Call it on all processes.

        Args:
            metrics: Values logged in training.
            newer: Names of newer values, which are kept. Default: none.
        """
        for entry, value in metrics.step_values(self.data_world):
            name = entry.label("step")
            if name not in newer:
                self._keep(entry, name, value, self.logged_values)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints."""
        values, watch = dict(self.callback_values), self.latest_validation.state_dict()
        return {"values": values, "wide": sorted(self.wide), "watch": watch, "evaluated": list(self.evaluated)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Args:
            state_dict: Result of `state_dict`.
        """
        self.callback_values.clear()
        self.callback_values.update(state_dict["values"])
        self.wide = set(state_dict["wide"])
        self.latest_validation.load_state_dict(state_dict["watch"])
        self.evaluated = list(state_dict["evaluated"])

    def write_value(self, name: str, value: Any) -> None:
        """Record a value that the user wrote into ``callback_metrics``.

        Args:
            name: The name.
            value: A number, a tensor with one element, or any other object, which cannot be monitored.
        """
        self.forget_value(name)
        is_tensor = isinstance(value, torch.Tensor)
        if (is_tensor and value.numel() == 1 and not value.is_complex()) or isinstance(value, int | float):
            self.callback_values[name] = float(value)
            self._written_names.add(name)
            if is_wide(value):
                self.wide.add(name)
        else:
            self.other_values[name] = value

    def forget_value(self, name: str) -> None:
        """Remove the value that the user wrote under a name, if any. Logged values are the same on all ranks, and stay.

        Args:
            name: The name.
        """
        self.other_values.pop(name, None)
        if name in self._written_names:
            self._written_names.discard(name)
            self.wide.discard(name)
            self.callback_values.pop(name, None)

    def agree_on_step_values(self, metrics: Metrics) -> list[tuple[Entry, float]]:
        """Return the values of the latest step, and make written numbers the same on all ranks. Call it on all ranks.

        Args:
            metrics: Values logged in training.
        """
        written = {name: self.callback_values[name] for name in self._written_names}
        values = metrics.step_values(self.data_world, written)
        self.agreed_names |= written.keys()
        self.callback_values.update(written)
        return values

    def note_epoch(self, step: int) -> None:
        """Add the epoch's values to the history.

        Args:
            step: Number of optimizer steps.
        """
        self.history.add(self._epoch_row, step)

    def write_epoch(self, step: int, epoch: int) -> None:
        """Send the values of the latest `update_epoch` to the loggers.

        Args:
            step: Number of optimizer steps.
            epoch: Index of the epoch.
        """
        self.write_row(self._epoch_row, step, epoch)

    def write_row(self, row: dict[str, float], step: int, epoch: int) -> None:
        """Send a row of reduced values to the loggers and the history. An empty row is not sent.

        Args:
            row: Values by name.
            step: Number of optimizer steps, under which the loggers receive the row unless it has a value "step".
            epoch: Index of the epoch.
        """
        if not row:
            return
        self.logged_values.update(row)
        self.history.add(row, step)
        sent = {"epoch": epoch, **row}
        # A finite "step" is the place on the x-axis, as in Lightning. Many tasks log the epoch under this name.
        if abs(sent.get("step", float("inf"))) < float("inf"):
            sent[EVALUATED_AT], step = step, int(sent.pop("step"))
        self.call_loggers("log_metrics", sent, step=step)

    def call_loggers(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the loggers that have not failed, on rank zero.

        Args:
            method: Name of the method.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
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
        """Call a function of a logger; after an error, warn and disable the logger unless it is strict."""
        try:
            use()
        except Exception as error:
            if logger.strict:
                raise
            self._failed.add(id(logger))
            warn(f"{type(logger).__name__}.{action} failed, so the logger is disabled: {describe_error(error)}")

    def locations(self) -> list[str]:
        """Return the locations to which rank zero's loggers wrote metrics: directories, or runs of a service."""
        # Only loggers that have written something, because reading the directory of another one would claim a
        # directory.
        written = [
            logger
            for logger in self.loggers
            if id(logger) in self._written - self._failed and not isinstance(logger, SilentLogger)
        ]
        return list(dict.fromkeys(str(logger.location) for logger in written))

    def clear(self) -> None:
        """Clear the latest values."""
        self.latest_validation = LatestValidation()
        for values in (self.callback_values, self.bar_values, self.logged_values, self.other_values):
            values.clear()
        self.wide.clear()
        self._written_names.clear()
        self.agreed_names.clear()

    def describe(self, task: TaskModule, datamodule: DataModule | None, hyperparameters: bool = True) -> None:
        """Send the hyperparameters and the model to the loggers.

        Args:
            task: The user's task.
            datamodule: The data module.
            hyperparameters: Whether to send hyperparameters. Default: True.

        Raises:
            ValueError: If the task and the data module have different values for a hyperparameter.
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
                        f"hyperparameter {name!r}: {type(task).__name__} has {merged[name]!r:.100} and "
                        f"{type(owner).__name__} has {hparams[name]!r:.100}, but loggers store one value per name. "
                        f"Rename one of the two, or exclude one with save_hyperparameters(ignore=[{name!r}]) or "
                        "save_hyperparameters(logger=False)."
                    )
                merged |= hparams
        if merged:
            self.call_loggers("log_hyperparams", merged)
        elif hyperparameters and self.world.is_main:
            for logger in self.loggers:
                if isinstance(logger, DirectoryLogger):  # scripts read the file, which then is empty
                    self._use(logger, "save_hyperparams", partial(logger.save_hyperparams, {}))
        self.call_loggers("log_graph", task)

    def agree_on_versions(self) -> None:
        """Set the loggers to rank zero's versions, so that all use the same directory. Call it on all processes."""
        if self.world.size == 1:
            return  # reading a version claims its directory; that can wait until something is logged
        # In one broadcast, because other ranks may have no logger.
        versions = [getattr(logger, "version", None) for logger in self.loggers] if self.world.is_main else None
        for logger, version in zip(self.loggers, self.world.broadcast(versions), strict=False):
            if getattr(logger, "version", None) != version:
                logger.version = version

    def agree_on_directory(self, root: str) -> str:
        """Return rank zero's run folder on every process. Call it on all processes.

        Args:
            root: The Trainer's ``default_root_dir``.
        """
        folder = self.world.broadcast(self.directory(root) if self.world.is_main else None)
        if folder != root and not any(logger.log_dir for logger in self.loggers):
            self.folder = folder
        return str(folder)

    def directory(self, root: str) -> str:
        """Return the run's folder. Call it on rank zero only.

        If no logger has a folder, this is one below ``root``, or ``root`` itself.

        Args:
            root: The Trainer's ``default_root_dir``.
        """
        folder = next((logger.log_dir for logger in self.loggers if logger.log_dir), self.folder)
        if folder is None and self.loggers and not isinstance(self.loggers[0], SilentLogger):
            folder = self.folder = self._make_folder(root)
        return root if folder is None else str(folder)

    def folder_of_runs(self, root: str) -> str:
        """Return the parent of the folders of runs whose loggers have none.

        Args:
            root: The Trainer's ``default_root_dir``.
        """
        return str(as_path(root) / (_make_file_name(self.loggers[0].name) or "treadle_logs"))

    def existing_folder(self, root: str) -> str | None:
        """Return the folder of a run whose loggers have none; None if it is not known yet.

        Args:
            root: The Trainer's ``default_root_dir``.
        """
        logger = self.loggers[0]
        if self.folder is None and type(logger).version is Logger.version and isinstance(logger.version, str):
            return str(as_path(self.folder_of_runs(root)) / _make_file_name(logger.version))
        return self.folder

    def _make_folder(self, root: str) -> str | None:
        """Create the run's folder and return its path; if that fails, warn and return None.

        The folder is named after the first logger's ``version`` if it is a string, such as the run ID of a tracking
        service. Otherwise, its name is ``version_`` and the next free number.
        """
        logger = self.loggers[0]
        if type(logger).version is Logger.version and logger.version is None:  # an overridden one may never change
            self._use(logger, "experiment", lambda: logger.experiment)  # reading it begins the run
        try:
            folder = self.existing_folder(root)
            if folder is None:
                above = self.folder_of_runs(root)
                return str(as_path(above) / f"version_{claim_version(above)}")
            if not is_url(folder):
                os.makedirs(folder, exist_ok=True)
            return folder
        except OSError as error:
            warn(
                f"the folder of this run cannot be created in {root}: {error.strerror or error}. Set default_root_dir "
                "to a writable directory."
            )
            return None


def choose_metrics(accelerator: Accelerator, barebones: bool) -> Callable[..., Metrics]:
    """Return a function that creates the store of a stage's values, from whether it is a training stage."""
    if barebones:
        return MutedMetrics
    copies = accelerator.dynamo_plugin.uses_cuda_graphs(accelerator.device)
    if accelerator.accumulation.sums is None:
        return partial(Metrics, copies=copies)
    return partial(ExactMetrics, accelerator.cursor, copies=copies)


def _make_file_name(name: str | None) -> str:
    """Convert a name, such as Databricks' ``/Users/me/run``, to a valid file name; ``""`` if no character remains."""
    return re.sub(r"[^\w.=@+-]+", "_", name or "").strip("._")
