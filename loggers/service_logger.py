"""Base class of loggers for tracking services in which one object represents a run, and helpers for such loggers."""

from __future__ import annotations

import importlib
import inspect
import os
import random
import secrets
import signal
import string
import sys
import threading
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from ..common.messages import nearest, warn
from ..common.remote_path import is_url
from ..common.validation import check_bool, check_bool_or_word, check_text
from .logger import Logger, Params, process_rank, rank_zero_experiment
from .values import as_mapping, as_metrics, flatten, plain


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the RNG states of Python, NumPy and PyTorch (CPU) and the signal handlers when the block ends.

    The states of NumPy and PyTorch are restored only if these packages were imported before the block. The handlers are
    restored only in the main thread.

    Opening a run with most services draws from Python's RNG, so training would not be reproducible. ClearML and SwanLab
    install signal handlers, which would replace Treadle's. Within the block, Python's RNG has a random seed, so
    that two runs with the same seed do not draw the same random names.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    torch_state = None if torch is None else torch.get_rng_state()
    # Only the main thread may set handlers, and None stands for one that Python did not install and cannot restore.
    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {s: signal.getsignal(s) for s in signal.valid_signals()} if in_main_thread else {}
    random.seed()
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if torch is not None:
            torch.set_rng_state(torch_state)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)


def check_options(function: str, options: Mapping[str, Any], also: Iterable[str] = ()) -> None:
    """Raise a TypeError for options that a function of a service does not accept.

    Args:
        function: Full name of the function, such as ``"trackio.init"``.
        options: Keyword arguments of the function by name.
        also: Names that the function accepts although its signature does not list them.
    """
    if not options:
        return
    package, *path = function.split(".")
    with undisturbed():
        target: Any = importlib.import_module(package)
    for part in path:
        target = getattr(target, part)
    arguments = inspect.signature(target).parameters.values()
    check_names(function, options, [*(a.name for a in arguments if a.kind is not a.VAR_KEYWORD), *also])


def check_names(function: str, options: Iterable[str], valid: Sequence[str]) -> None:
    """Raise a TypeError for the first option that is not a valid name. The error does not show values such as tokens.

    Args:
        function: Name of the function, for the error message.
        options: Names of the options.
        valid: Names of the function's arguments.
    """
    for option in options:
        if option not in valid:
            raise TypeError(
                f"{function} has no argument {option!r}. Its arguments are {', '.join(valid)}.{nearest(option, valid)}"
            )


class Uploads:
    """Queue of the checkpoints to upload to a tracking service.

    Args:
        mode: True uploads the kept checkpoints at the end of a fit, or each one when it is saved with
            ``ModelCheckpoint(save_top_k=-1)``; ``"all"`` uploads each one when it is saved; False uploads none.
    """

    def __init__(self, mode: bool | str) -> None:
        self._mode = mode
        self._callbacks: dict[int, Any] = {}
        self._was_notified = False
        self._warned_of_url = False
        self._uploaded_times: dict[str, int] = {}

    def collect_after_save(self, callback: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Yield the path, callback and metadata of each checkpoint to upload after a save."""
        self._was_notified = True
        if self._mode == "all" or (self._mode and callback.save_top_k == -1):
            yield from self._iterate_new(callback)
        elif self._mode:
            self._callbacks[id(callback)] = callback

    def collect_at_end(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Yield the path, callback and metadata of each checkpoint to upload at the end of a fit."""
        if self._mode and not self._was_notified:
            warnings.warn(
                f"log_model={self._mode!r} uploads nothing, because the logger was not notified of any checkpoint. Use "
                "a ModelCheckpoint. Without a Trainer, call the logger's after_save_checkpoint(callback) after each "
                "save.",
                stacklevel=4,
            )
        for callback in self._callbacks.values():
            yield from self._iterate_new(callback)

    def _iterate_new(self, callback: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        scores_by_path = {
            callback.last_model_path: callback.current_score,
            callback.best_model_path: callback.best_model_score,
        }
        for path, score in {**scores_by_path, **callback.best_k_models}.items():
            if is_url(path) and not self._warned_of_url:
                self._warned_of_url = True
                warn(
                    f"log_model={self._mode!r} uploads checkpoints on disk only, so those in "
                    f"{path.rpartition('/')[0]} are not uploaded. Set log_model=False, or save to a directory."
                )
            if not path or is_url(path) or not os.path.exists(path):
                continue
            written = os.stat(path).st_mtime_ns  # another checkpoint may take the same path
            if self._uploaded_times.get(path) == written:
                continue
            settings = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only", "every_n_train_steps")
            facts = {"score": score, "original_filename": Path(path).name}
            yield path, callback, plain({**facts, type(callback).__name__: {s: getattr(callback, s) for s in settings}})
            self._uploaded_times[path] = written


def make_id(length: int) -> str:
    """Return an ID of lowercase letters and digits from the system's RNG, which training does not use."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(length))


# The runs that this process has open, so that a copy of a logger uses its run instead of opening it a second time.
_open_runs: WeakValueDictionary[tuple[type, str | None, Any], Any] = WeakValueDictionary()


class ServiceLogger(Logger):
    """Base class of loggers that write to one run of a tracking service, opened on first use and reopened by its ID.

    A subclass implements the abstract methods, and does not store objects of the service. Only rank zero opens the run.

    Args:
        name: Name of the experiment or project; None for the service's default.
        version: ID of the run to continue; None for a new run or, in some loggers, the service's active run.
        texts: Arguments to check, by name. Each must be a string or None.
        prefix: Text before every metric's name; None for no prefix.
        log_model: Upload checkpoints: True uploads the kept checkpoints at the end of a fit, or each one when it is
            saved with ``ModelCheckpoint(save_top_k=-1)``; ``"all"`` uploads each one when it is saved; False uploads
            none. Checkpoints at a URL are skipped.
        strict: Raise the logger's errors. If False, the first error becomes a warning, and the run continues without
            this logger.
        separator: Text between the prefix and the name. Default: ``"-"``.
    """

    _version: Any = None
    closes_with_stage = True
    """True if the run is closed at the end of each stage. Otherwise, only a failed stage and `finish` close it."""

    def __init__(
        self,
        name: str | None,
        version: str | None,
        texts: dict[str, Any],
        *,
        prefix: str | None,
        log_model: bool | str,
        strict: bool,
        separator: str = "-",
    ) -> None:
        self.strict = check_bool("strict", strict)
        for argument, value in {**texts, "prefix": prefix}.items():
            if value is not None:
                check_text(argument, value)
        check_bool_or_word("log_model", log_model, ("all",))
        self._log_model = log_model
        self._prefix = f"{prefix}{separator}" if prefix else ""
        self._uploads = Uploads(log_model)
        self._name: Any = name
        self._version = version
        self._experiment: Any = None  # keeps the run in `_open_runs`

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, which reopens the run by its ID."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_experiment", "_uploads")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._experiment, self._uploads = None, Uploads(self._log_model)

    @abstractmethod
    def _open(self) -> Any:
        """Begin a run, or continue the run ``self._version``. Set ``self._version``, and return the run object."""

    def _is_closed(self, run: Any) -> bool:
        """Return whether a run was closed, by a logger, by the user or because another run began."""
        return False

    @abstractmethod
    def _write_row(self, run: Any, row: dict[str, float], step: int) -> None:
        """Record a row of metrics under their full names."""

    @abstractmethod
    def _write_params(self, run: Any, params: dict[str, Any]) -> None:
        """Record hyperparameters, which may be nested and contain only plain data."""

    @abstractmethod
    def _close(self, run: Any, failed: bool) -> None:
        """Write all buffered data, and end the run as successful or, if ``failed`` is True, as failed."""

    @abstractmethod
    def _write_checkpoint(self, run: Any, path: str, aliases: list[str], facts: dict[str, Any]) -> None:
        """Upload a checkpoint, which is a file or a folder, with its aliases and its metadata (``facts``)."""

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
        _open_runs[type(self), self.name, self._version] = self._experiment = run
        return run

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
        step = self.next_step(step)
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

    def _upload_waiting(self) -> None:
        self._upload(self._uploads.collect_at_end())

    def _upload(self, checkpoints: Iterable[tuple[str, Any, dict[str, Any]]]) -> None:
        if process_rank() != 0:
            return
        for path, callback, facts in checkpoints:
            aliases = ["latest", "best"] if path == callback.best_model_path else ["latest"]
            with undisturbed():
                self._write_checkpoint(self.experiment, path, aliases, facts)

    def finalize(self, status: str = "success") -> None:
        """Upload the pending checkpoints. Close the run if the stage failed or `closes_with_stage` is True.

        Later logging continues the run.

        Args:
            status: ``"success"`` or ``"finished"`` if the stage succeeded, any other word if it failed. Default:
                ``"success"``.
        """
        failed = status.lower() not in ("success", "finished")  # also MLflow's "FINISHED"
        try:
            self._upload_waiting()
        finally:
            if self.closes_with_stage or failed:
                self._end(failed)
            else:
                self.save()

    def finish(self) -> None:
        """Close the run once everything is sent or written. Later logging reopens it by its ID."""
        self._end(failed=False)

    def _end(self, failed: bool) -> None:
        run = self._find_open_run()
        if run is None and failed and self._experiment is not None:  # another run closed it, as ended well
            run = self.experiment
        self._experiment = None
        if run is not None:
            with undisturbed():
                self._close(run, failed)
            _open_runs.pop((type(self), self.name, self._version), None)
