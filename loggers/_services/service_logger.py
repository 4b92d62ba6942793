"""Base class of loggers for tracking services in which one object represents a run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

from ...common.validation import check_bool
from ..logger import Logger, Params, process_rank, rank_zero_experiment
from ..values import as_mapping, as_metrics, check_step, flatten, plain
from .arguments import check_arguments
from .side_effects import undisturbed
from .uploads import Uploads

# The runs that this process has open, so that a copy of a logger uses its run instead of opening it a second time.
_open_runs: WeakValueDictionary[tuple[type, str | None, Any], Any] = WeakValueDictionary()


class ServiceLogger(Logger):
    """Base class of loggers that write to one run of a tracking service, opened on first use and reopened by its ID.

    A subclass implements the abstract methods, and does not store objects of the service. Only rank zero opens the run.

    Args:
        name: Name of the experiment or project; None for the service's default.
        version: ID of the run to continue; None for a new run or, in some loggers, the service's active run.
        prefix: Text before every metric's name; None for no prefix.
        separator: Text between the prefix and the name. Default: ``"-"``.
        log_model: Upload checkpoints: True uploads the kept checkpoints at the end of a fit, or each one when it is
            saved with ``ModelCheckpoint(save_top_k=-1)``; ``"all"`` uploads each one when it is saved; False uploads
            none. Checkpoints at a URL are skipped.
        strict: Raise the logger's errors. If False, the first error becomes a warning, and the run continues without
            this logger.
        texts: Additional arguments to check, by name. Each must be a string or None.
    """

    _version: Any = None
    closes_with_stage = True
    """True if the run is closed at the end of each stage. Otherwise, only a failed stage and `finish` close it."""

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
        self._run: Any = None  # keeps the run in `_open_runs`
        self._uploads = Uploads(self._log_model)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, which reopens the run by its ID."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_run", "_uploads")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @abstractmethod
    def _open(self) -> Any:
        """Begin a run, or continue the run ``self._version``. Set ``self._version``, and return the run object."""

    @abstractmethod
    def _is_closed(self, run: Any) -> bool:
        """Return whether a run was closed, by a logger, by the user or because another run began."""

    @abstractmethod
    def _write_row(self, run: Any, row: dict[str, float], step: int) -> None:
        """Record a row of metrics under their full names."""

    @abstractmethod
    def _write_params(self, run: Any, params: dict[str, Any]) -> None:
        """Record hyperparameters, which may be nested and contain only plain data."""

    @abstractmethod
    def _write_checkpoint(self, run: Any, path: str, aliases: list[str], facts: dict[str, Any]) -> None:
        """Upload a checkpoint, which is a file or a folder, with its aliases and its metadata (``facts``)."""

    @abstractmethod
    def _close(self, run: Any, failed: bool) -> None:
        """Write all buffered data, and end the run as successful or, if ``failed`` is True, as failed."""

    @property
    def name(self) -> str | None:
        """Name of the experiment or project."""
        return self._name

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The service's run object; a `NullExperiment` on nonzero ranks. The first access begins or reopens the run."""
        run = self._find_open_run()
        if run is None:
            with undisturbed():
                run = self._open()
        self._adopt(run)
        return run

    def _adopt(self, run: Any) -> None:
        """Use an open run with the ID ``self._version`` for this logger and its copies."""
        _open_runs[type(self), self.name, self._version] = self._run = run

    def _is_of_a_logger(self, run: Any) -> bool:
        """Return whether a logger opened the run. A new logger uses an active run only if the user began it."""
        return any(run is opened for opened in _open_runs.values())

    def _find_open_run(self) -> Any:
        run = None if self._version is None else _open_runs.get((type(self), self.name, self._version))
        return None if run is None or self._is_closed(run) else run

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Record metrics.

        Args:
            metrics: Values by name: a number, a tensor with one element, or a dict of them, recorded as ``name/key``.
            step: Optimizer step of the values. Default: one more than the highest previous step.

        Raises:
            TypeError: If ``metrics`` or ``step`` has the wrong type.
            ValueError: If a tensor does not have exactly one element, or the step is negative.
        """
        row = dict(flatten(as_metrics(metrics, self._prefix)))
        step = check_step(self._last_step + 1 if step is None else step)
        self._last_step = max(self._last_step, step)
        if process_rank() == 0:
            self._write_row(self.experiment, row, step)

    def _pop_epoch(self, row: dict[str, float]) -> int | None:
        """Remove the epoch from a row and return it, for services that store the epoch with each value."""
        epoch = row.pop(f"{self._prefix}epoch", None)
        return None if epoch is None else int(epoch)

    def log_hyperparams(self, params: Params, metrics: dict[str, Any] | None = None) -> None:
        """Record hyperparameters and, if passed, metrics at step 0.

        Args:
            params: Settings by name, nested or not.
            metrics: Initial values of the metrics. Default: none.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If a metric is a tensor that does not have exactly one element.
        """
        values = plain(as_mapping(params))
        if process_rank() == 0 and values:
            self._write_params(self.experiment, values)
        if metrics:
            self.log_metrics(metrics, step=0)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Upload the kept checkpoints immediately, leave them to `finalize`, or do nothing; see ``log_model``.

        Args:
            checkpoint_callback: The callback that saved the checkpoint.
        """
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
        """Upload the pending checkpoints. Close the run if the stage failed or `closes_with_stage` is True.

        Later logging continues the run.

        Args:
            status: ``"success"`` or ``"failed"``. Default: ``"success"``.
        """
        try:
            self._upload_waiting()
        finally:
            if self.closes_with_stage or status == "failed":
                self._end(failed=status == "failed")
            else:
                self.save()

    def finish(self) -> None:
        """Close the run once everything is sent or written. Later logging reopens it by its ID."""
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
