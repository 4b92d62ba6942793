"""Base of the loggers whose service keeps one object per run, which is opened, written to, closed and reopened."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

from ...common.validation import check_bool
from ..logger import Logger, Params, process_rank, rank_zero_experiment
from ..values import as_mapping, as_metrics, check_step, flatten, plain
from .arguments import check_arguments
from .undisturbed import undisturbed
from .uploads import Uploads

# The runs that this process has open, so that a copy of a logger uses its run instead of opening it a second time,
# which Aim and GoodSeed refuse.
_open_runs: WeakValueDictionary[tuple[type, str | None, Any], Any] = WeakValueDictionary()


class ServiceLogger(Logger):
    """A run of a tracking service. It is opened at the first use on rank 0, and by its id again after it was closed.

    A subclass writes the six methods below whose names begin with an underscore, and keeps no object of the service.

    Args:
        name: The experiment or project.
        version: Id of a run to continue. Default: a new run, whose id is ``version`` from then on.
        prefix: Put before every metric's name. Default: nothing.
        separator: Between the prefix and the name.
        log_model: Upload checkpoints: True those that are kept, when a fit ends; ``"all"`` each as it is saved.
        strict: Let a failure end the run.
        texts: More arguments that are strings or None, by name, to be checked.
    """

    _version: Any = None
    closes_with_stage = True
    """Whether each fit, validation or test closes the run. Else only a failed one and `finish` do."""

    def __init__(
        self,
        *,
        name: str | None,
        version: str | None,
        prefix: str | None,
        log_model: bool | str,
        strict: bool,
        separator: str = "-",
        texts: dict[str, Any] | None = None,
    ) -> None:
        self.strict = check_bool("strict", strict)
        check_arguments(log_model, {"prefix": prefix, **(texts or {})})
        self._name: Any = name
        self._version = version
        self._prefix = f"{prefix}{separator}" if prefix else ""
        self._log_model = log_model
        self._last_step = -1
        self._forget()

    def _forget(self) -> None:
        """Drop what belongs to this object alone, and not to a copy of it."""
        self._run: Any = None  # which holds the run in `_open_runs`
        self._uploads = Uploads(self._log_model)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, which continues the run by its id."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_run", "_uploads")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @abstractmethod
    def _open(self) -> Any:
        """Begin a run, or continue ``self._version``; set ``self._version`` and return the service's object."""

    @abstractmethod
    def _is_closed(self, run: Any) -> bool:
        """Return whether a run takes nothing more, as it was closed here, by the user or by another run."""

    @abstractmethod
    def _write_row(self, run: Any, row: dict[str, float], step: int) -> None:
        """Record numbers by their full names."""

    @abstractmethod
    def _write_params(self, run: Any, params: dict[str, Any]) -> None:
        """Record hyperparameters, nested and plain."""

    @abstractmethod
    def _write_checkpoint(self, run: Any, path: str, aliases: list[str], facts: dict[str, Any]) -> None:
        """Upload a checkpoint, a folder."""

    @abstractmethod
    def _close(self, run: Any, failed: bool) -> None:
        """Write out everything and end the run with its status."""

    @property
    def name(self) -> str | None:
        """Name of the experiment or project."""
        return self._name

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The service's own object. The first read opens the run, or the one to continue."""
        run = self._find_open_run()
        if run is None:
            with undisturbed():
                run = self._open()
        self._adopt(run)
        return run

    def _adopt(self, run: Any) -> None:
        """Hold an open run, whose id is ``self._version``, for this logger and its copies."""
        _open_runs[type(self), self.name, self._version] = self._run = run

    def _is_of_a_logger(self, run: Any) -> bool:
        """Return whether a run was begun by a logger, and not by the user, who means it for what is logged next."""
        return any(run is opened for opened in _open_runs.values())

    def _find_open_run(self) -> Any:
        run = None if self._version is None else _open_runs.get((type(self), self.name, self._version))
        return None if run is None or self._is_closed(run) else run

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Record numbers.

        Args:
            metrics: Value by name: a number, a tensor of one element, or a dict of them, recorded as ``name/key``.
            step: Optimizer step the values belong to. Default: one more than the highest so far.

        Raises:
            TypeError: A value is not a number, or the step is not an integer.
            ValueError: A value is more than one number, or the step is negative.
        """
        row = dict(flatten(as_metrics(metrics, self._prefix)))
        step = check_step(self._last_step + 1 if step is None else step)
        self._last_step = max(self._last_step, step)
        if process_rank() == 0:
            self._write_row(self.experiment, row, step)

    def _pop_epoch(self, row: dict[str, float]) -> int | None:
        """Take the epoch out of a row, for a service that keeps it with each value."""
        epoch = row.pop(f"{self._prefix}epoch", None)
        return None if epoch is None else int(epoch)

    def log_hyperparams(self, params: Params, metrics: dict[str, Any] | None = None) -> None:
        """Record hyperparameters, and metrics, if any, at step 0.

        Args:
            params: Settings by name, nested or not. What has no plain type is recorded as its ``str``.
            metrics: Starting values of the metrics by which runs are compared. Default: none.

        Raises:
            TypeError: ``params`` has no names, or a metric is not a number.
        """
        values = plain(as_mapping(params))
        if process_rank() == 0 and values:
            self._write_params(self.experiment, values)
        if metrics:
            self.log_metrics(metrics, step=0)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Upload what the callback keeps, now or when the fit ends, as ``log_model`` says."""
        self._upload(self._uploads.collect_after_save(checkpoint_callback))

    def _upload(self, checkpoints: Iterable[tuple[str, Any, dict[str, Any]]]) -> None:
        if process_rank() != 0:
            return
        for path, callback, facts in checkpoints:
            aliases = ["latest", "best"] if path == callback.best_model_path else ["latest"]
            with undisturbed():
                self._write_checkpoint(self.experiment, path, aliases, facts)

    def _upload_waiting(self) -> None:
        self._upload(self._uploads.collect_at_end())

    def finalize(self, status: str = "success") -> None:
        """Upload the checkpoints that wait, and note how it ended. What is logged later continues the run.

        Args:
            status: ``"success"`` or ``"failed"``.
        """
        try:
            self._upload_waiting()
        finally:
            if self.closes_with_stage or status == "failed":
                self._end(failed=status == "failed")
            else:
                self.save()

    def finish(self) -> None:
        """Close the run, once all of it is sent or written. What is logged later continues it by its id."""
        self._end(failed=False)

    def _end(self, failed: bool) -> None:
        run = self._find_open_run()
        if run is None and failed and self._run is not None:  # another run closed it, as ended well
            run = self.experiment
        self._run = None
        if run is not None:
            with undisturbed():
                self._close(run, failed)
            _open_runs.pop((type(self), self.name, self._version), None)
