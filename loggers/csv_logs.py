"""`CSVLogger`: writes metrics to a CSV file."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import mmap
import os
from collections.abc import Iterable
from typing import Any

from ..common.mirror import flush
from ..common.validation import check_bool, check_int
from .directory import DirectoryLogger
from .logger import EVALUATED_AT, Params, process_rank, rank_zero_experiment
from .values import as_metrics, flatten

STEP = "step"


class CSVLogger(DirectoryLogger):
    """Logger that writes ``metrics.csv`` and ``hparams.yaml`` to ``save_dir/name/version_N``.

    Each call to `log_metrics` adds one row with the step and the metrics. A new metric adds a column at the end. If
    ``metrics.csv`` exists, new rows are appended to it.

    Args:
        save_dir: Parent directory of the experiments, or a URL; see `DirectoryLogger`.
        name: Name of the experiment's directory in ``save_dir``. If None or ``""``, versions are written directly to
            ``save_dir``. Default: ``"treadle_logs"``.
        version: A number N for ``version_N``, or the name of a directory. Default: the next unused number.
        prefix: Text before every metric's name, as ``prefix-name``. Default: none.
        flush_logs_every_n_steps: Number of rows to buffer. The rows are written once there are this many, or once they
            span this many steps. A killed process loses the buffered rows. Default: 100.
        strict: Raise errors from the logger instead of disabling it with a warning. Default: False.

    Raises:
        TypeError, ValueError: If an argument is invalid.

    Examples:
        >>> import tempfile
        >>> from treadle.loggers import CSVLogger
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     logger = CSVLogger(folder)
        ...     logger.log_metrics({"loss": 0.5}, step=1)
        ...     logger.save()
        ...     print(open(f"{logger.log_dir}/metrics.csv").read().rstrip())
        step,loss
        1,0.5
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "treadle_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
        strict: bool = False,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        self.strict = check_bool("strict", strict)
        self._flush_every = check_int(
            "flush_logs_every_n_steps", flush_logs_every_n_steps, 1, "writes every row immediately"
        )

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The `MetricsFile` of this version, created on first access; a `NullExperiment` on nonzero ranks."""
        if self._experiment is None:
            self._experiment = MetricsFile(str(self.files_dir), self._flush_every)
        return self._experiment

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Add one row.

        Args:
            metrics: Numbers or tensors by name; a nested dict adds columns named ``name/key``. A metric named ``step``
                that differs from ``step`` gets the column ``step_metric``.
            step: Optimizer step of the values. Default: the metric named ``step``, or one more than the highest
                previous step.

        Raises:
            TypeError, ValueError: If a name, a value or the step is invalid.
        """
        row = dict(flatten(as_metrics(metrics, self._prefix)))
        logged = row.pop(STEP, None)
        step = self.next_step(int(logged) if step is None and logged is not None else step)
        row |= {f"{STEP}_metric": logged} if logged not in (None, step) else {}
        self.experiment.log_metrics(row, step)

    def log_hyperparams(self, params: Params = None, metrics: dict[str, Any] | None = None) -> None:
        """Write hyperparameters to ``hparams.yaml`` and, if passed, metrics as a row at step 0.

        Args:
            params: Settings by name, nested or not. Default: none.
            metrics: Initial values of metrics. Default: none.

        Raises:
            TypeError, ValueError: If an argument is invalid.
        """
        self.save_hyperparams(params)
        if metrics:
            self.log_metrics(metrics, step=0)

    def on_resume(self, step: int) -> None:
        """Remove the rows of later steps from ``metrics.csv``, because the resumed run logs these steps again.

        Args:
            step: Number of optimizer steps completed when the checkpoint was saved.
        """
        if process_rank() == 0 and self._version is not None:
            self.experiment.on_resume(step)

    def save(self) -> None:
        """Write the buffered rows to the file."""
        if self._experiment is not None:
            self._experiment.save()

    def finalize(self, status: str) -> None:
        """Write the buffered rows. Later calls to `log_metrics` append to the file.

        Args:
            status: ``"success"`` or ``"failed"``.
        """
        self.save()
        if self._experiment is not None and not self._experiment.waiting:  # otherwise a subclass's save() keeps them
            self._experiment = None
            flush(str(self.log_dir))


class MetricsFile:
    """Writer of ``metrics.csv`` that does not keep the file open.

    Attributes:
        waiting: Rows that are not yet written.
    """

    def __init__(self, log_dir: str, flush_every: int = 100) -> None:
        os.makedirs(log_dir, exist_ok=True)
        self.path = os.path.join(log_dir, "metrics.csv")
        self._flush_every = flush_every
        self.waiting: list[dict[str, float]] = []
        self._columns: list[str] = []
        if os.path.exists(self.path):
            _drop_torn_row(self.path)
            with open(self.path, newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file), [])

    @property
    def metrics_file_path(self) -> str:
        """Path of the file, under the name that Lightning uses."""
        return self.path

    @property
    def log_dir(self) -> str:
        """Directory of the file, under the name that Lightning uses."""
        return os.path.dirname(self.path)

    @property
    def metrics(self) -> list[dict[str, float]]:
        """All rows, written and buffered, without empty cells. Each access reads the file."""
        rows: list[dict[str, float]] = []
        if os.path.exists(self.path):
            with open(self.path, newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    rows.append({name: _parse_cell(cell) for name, cell in row.items() if cell})
        return [*rows, *(dict(row) for row in self.waiting)]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add one row. Write the buffered rows once there are ``flush_every``, or once they span this number of steps.

        Args:
            metrics: Numbers by name.
            step: Optimizer step of the values. Default: the number of rows so far.
        """
        step = len(self.metrics) if step is None else step
        self.waiting.append({STEP: step, **metrics})
        steps = step - self.waiting[0][STEP] + 1
        if steps >= self._flush_every or len(self.waiting) >= self._flush_every:
            self.save()

    def save(self) -> None:
        """Write the buffered rows. They stay in the buffer if the write fails."""
        if not self.waiting:
            return
        row_columns = dict.fromkeys(key for row in self.waiting for key in row)
        new_columns = [key for key in row_columns if key not in self._columns]
        if new_columns or not os.path.exists(self.path):
            self._write_anew(self._columns + new_columns)
        text = _format_csv([row.get(column, "") for column in self._columns] for row in self.waiting)
        size = os.path.getsize(self.path)
        try:
            with open(self.path, "a", newline="", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)  # otherwise a partial write would be duplicated by the next try
            raise
        self.waiting.clear()

    def on_resume(self, step: int) -> None:
        """Remove the rows of steps after ``step`` from the file."""
        self.save()
        if os.path.exists(self.path):
            self._write_anew(self._columns, step)

    def _write_anew(self, columns: list[str], until: float = math.inf) -> None:
        """Rewrite the file row by row, with new columns at the end and without the rows of steps after ``until``."""
        # In rows of an evaluation's batches the step counts batches, so the column of optimizer steps comes first.
        places = [place for place, name in enumerate(self._columns) if name.endswith(EVALUATED_AT)]
        places += [place for place, name in enumerate(self._columns) if name == STEP]
        with open(self.path + ".tmp", "w", newline="", encoding="utf-8") as target:
            target.write(_format_csv([columns]))
            if os.path.exists(self.path):
                with open(self.path, newline="", encoding="utf-8") as source:
                    rows = csv.reader(source)
                    next(rows, None)
                    for row in rows:
                        if not _is_later([row[place] for place in places if place < len(row)], until):
                            target.write(_format_csv([row + [""] * (len(columns) - len(row))]))
            target.flush()
            os.fsync(target.fileno())  # the next line replaces the old file, so the new one must be on disk
        os.replace(self.path + ".tmp", self.path)
        self._columns = columns


def _parse_cell(cell: str) -> Any:
    """Return the number in a cell, or the cell's text if it is not a number."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(cell)
    return cell


def _is_later(cells: list[str], step: float) -> bool:
    """Return whether the first cell that is not empty contains a step later than ``step``."""
    try:
        return float(next(filter(None, cells))) > step
    except (StopIteration, ValueError):
        return False


def _format_csv(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _drop_torn_row(path: str) -> None:
    """Truncate the file after its last line break, because a crash may leave a partial row."""
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        if not end:  # which can't be mapped
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            keep = content.rfind(b"\n") + 1
        if keep < end:
            file.truncate(keep)
