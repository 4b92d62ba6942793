"""`TensorBoardLogger`: writes event files for TensorBoard."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..common.mirror import flush
from ..common.validation import check_bool
from .directory import DirectoryLogger
from .logger import Params, process_rank, rank_zero_experiment
from .service_logger import check_names
from .values import as_metrics, as_number, flatten

if TYPE_CHECKING:
    import torch

WRITER_OPTIONS = ("comment", "purge_step", "max_queue", "flush_secs", "filename_suffix")
_FIRST_FILE = "events.out.tfevents.0000000000.hparams"  # TensorBoard reads files in the order of their names
_EXPERIMENT = "_hparams_/experiment"


class TensorBoardLogger(DirectoryLogger):
    """Logger that writes TensorBoard event files and ``hparams.yaml`` to ``save_dir/name/version_N``.

    ``tensorboard --logdir save_dir`` displays the logs.

    Args:
        save_dir: Parent directory of the experiments, or a URL; see `DirectoryLogger`.
        name: Name of the experiment's directory in ``save_dir``. If None or ``""``, versions are written directly to
            ``save_dir``. Default: ``"treadle_logs"``.
        version: A number N for ``version_N``, or the name of a directory. Default: the next unused number.
        log_graph: Whether to record the model's graph. Default: False.
        default_hp_metric: Whether `log_hyperparams` records ``hp_metric`` = -1 if no metrics are passed. Default: True.
        prefix: Text before every metric's name, as ``prefix-name``. Default: none.
        sub_dir: Subdirectory of ``version_N`` for the files. Default: none.
        strict: Raise errors from the logger instead of disabling it with a warning. Default: False.
        **kwargs: Arguments of ``torch.utils.tensorboard.SummaryWriter``, such as ``max_queue`` (events) and
            ``flush_secs`` (seconds).

    Raises:
        TypeError, ValueError: If an argument is invalid.

    Examples:
        >>> import os, tempfile
        >>> from treadle.loggers import TensorBoardLogger
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     logger = TensorBoardLogger(folder, name="digits")
        ...     logger.log_metrics({"loss": 0.5}, step=1)
        ...     logger.finalize("success")
        ...     len(os.listdir(logger.log_dir))
        1
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "treadle_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        self.strict = check_bool("strict", strict)
        check_names("SummaryWriter", kwargs, WRITER_OPTIONS)
        self._sub_dir = None if sub_dir is None else os.path.expandvars(os.path.expanduser(os.fspath(sub_dir)))
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._writer_options = kwargs
        self._shown: tuple[dict[str, Any], dict[str, Any]] | None = None  # hyperparameters and metrics of all calls

    @property
    def log_dir(self) -> str | None:
        """Directory of this version's files; None if the version is not known on this rank."""
        directory = super().log_dir
        return os.path.join(directory, self._sub_dir) if directory is not None and self._sub_dir else directory

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The ``SummaryWriter``, opened on first access; a `NullExperiment` on nonzero ranks."""
        if self._experiment is None:
            from torch.utils.tensorboard import SummaryWriter

            directory = str(self.files_dir)
            os.makedirs(directory, exist_ok=True)
            self._experiment = SummaryWriter(directory, **self._writer_options)
            # It hides events of an earlier job. If the writer is opened again, it would hide this job's events.
            self._writer_options.pop("purge_step", None)
        return self._experiment

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Record metrics as scalars.

        Args:
            metrics: Numbers or tensors by name. The entries of a nested dict share one chart.
            step: Optimizer step of the values. Default: one more than the highest previous step.

        Raises:
            TypeError, ValueError: If a name, a value or the step is invalid.
        """
        numbers = as_metrics(metrics, self._prefix)
        step = self.next_step(step)
        writer = self.experiment
        for name, value in numbers.items():
            if isinstance(value, dict):
                writer.add_scalars(name, value, step)
            else:
                writer.add_scalar(name, value, step)

    def log_hyperparams(
        self, params: Params, metrics: dict[str, Any] | float | None = None, step: int | None = None
    ) -> None:
        """Record hyperparameters for TensorBoard's HParams dashboard and in ``hparams.yaml``.

        The dashboard shows the hyperparameters and the metrics of all calls. While TensorBoard is running, it may show
        those of a second call only after it is started again.

        Args:
            params: Settings by name, nested or not.
            metrics: Initial values of metrics; a single number is the value of ``hp_metric``. To update them in the
                HParams dashboard, log metrics under the same names during training. Default: ``hp_metric`` = -1, or
                none if ``default_hp_metric`` is False.
            step: Optimizer step of ``metrics``. Default: 0.

        Raises:
            TypeError, ValueError: If an argument is invalid.
        """
        if metrics is None:
            metrics = {"hp_metric": -1} if self._default_hp_metric else {}
        elif not isinstance(metrics, Mapping):
            metrics = {"hp_metric": as_number("hp_metric", metrics)}
        tags = as_metrics(metrics, self._prefix)
        self.save_hyperparams(params)
        flat = {
            name: value if isinstance(value, bool | int | float | str) else str(value)  # TensorBoard's types
            for name, value in flatten(self._hparams)
        }
        if process_rank() != 0:
            return
        from torch.utils.tensorboard.summary import hparams

        if metrics:
            self.log_metrics(metrics, 0 if step is None else step)
        # SummaryWriter.add_hparams would create another run for them, away from the metrics. The writer's
        # `file_writer` is None after a user closed it; this method opens it again, as all its add_* methods do.
        file_writer = self.experiment._get_file_writer()
        first_file, shown = os.path.join(str(self.files_dir), _FIRST_FILE), self._shown
        if shown is None and os.path.exists(first_file):
            shown = {}, _read_metrics(first_file)
        self._shown = flat, tags if shown is None else shown[1] | tags
        # Without an experiment, TensorBoard shows all scalars as metrics; with an empty one, it would show none.
        summaries = [s for s in hparams(*self._shown) if self._shown[1] or s.value[0].tag != _EXPERIMENT]
        for summary in summaries:
            file_writer.add_summary(summary)
        if shown is not None and shown != self._shown:
            _write_summaries(first_file, summaries)  # because TensorBoard keeps only the first summary of each kind

    def log_graph(self, model: torch.nn.Module, input_array: Any = None) -> None:
        """Record the model's graph once, if the logger was created with ``log_graph=True``.

        Warn if no input is available or the model cannot be traced.

        Args:
            model: The module, not wrapped for distributed training.
            input_array: Input of ``forward``. Default: the module's ``example_input_array``.
        """
        if not self._log_graph or process_rank() != 0:
            return
        self._log_graph = False
        if input_array is None:
            input_array = getattr(model, "example_input_array", None)
        if input_array is None:
            warnings.warn(
                "log_graph=True needs an input to trace the model. Set the model's example_input_array, or pass "
                "log_graph=False.",
                stacklevel=2,
            )
            return
        try:
            with _restore_after_tracing(model):
                self.experiment.add_graph(model, input_array)
        except Exception as error:
            warnings.warn(
                f"the model's graph is not recorded, because tracing {type(model).__name__} failed: {error}. "
                "Pass log_graph=False if the model cannot be traced.",
                stacklevel=2,
            )

    def on_resume(self, step: int) -> None:
        """Make TensorBoard ignore the existing events of all steps after ``step``.

        Args:
            step: Number of optimizer steps completed when the checkpoint was saved.
        """
        if process_rank() == 0 and self._version is not None:
            self.finalize("success")
            self._writer_options.setdefault("purge_step", step + 1)

    def save(self) -> None:
        """Write the buffered events."""
        if self._experiment is not None:
            self._experiment.flush()

    def finalize(self, status: str) -> None:
        """Write all events and close the file. Later logging opens another file in the same directory.

        Args:
            status: ``"success"`` or ``"failed"``.
        """
        if self._experiment is not None:
            self._experiment.flush()
            self._experiment.close()
            self._experiment = None
            flush(str(self.log_dir))


def _write_summaries(path: str, summaries: list[Any]) -> None:
    """Write summaries to an event file, which replaces an existing one."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    with open(f"{path}.tmp", "wb") as file:
        records = RecordWriter(file)
        for event in (Event(file_version="brain.Event:2"), *(Event(summary=summary) for summary in summaries)):
            event.wall_time = time.time()
            records.write(event.SerializeToString())
    os.replace(f"{path}.tmp", path)


def _read_metrics(path: str) -> dict[str, Any]:
    """Return the names of the metrics in the experiment that `_write_summaries` wrote."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    values = (value for event in EventFileLoader(path).Load() for value in event.summary.value)
    contents = (HParamsPluginData.FromString(value.metadata.plugin_data.content) for value in values)
    return {metric.name.tag: 0 for content in contents for metric in content.experiment.metric_infos}


@contextlib.contextmanager
def _restore_after_tracing(model: torch.nn.Module) -> Iterator[None]:
    """Restore the RNG state and each module's mode after tracing.

    After tracing, torch (seen in 2.13) sets every submodule to the mode of the outermost module. This would put layers
    that are in evaluation mode into training mode.
    """
    import torch

    modes = {module: module.training for module in model.modules()}
    devices = {parameter.device.index for parameter in model.parameters() if parameter.is_cuda}
    try:
        with torch.random.fork_rng(devices=sorted(devices)), torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
