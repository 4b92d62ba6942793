"""`ThroughputMonitor`: logs the throughput of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..common.messages import describe_error, warn
from ..common.validation import check_int, check_number
from ..engine.metrics import read_numbers
from ._throughput import Throughput, get_available_flops
from .best_effort import BestEffortCallback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class ThroughputMonitor(BestEffortCallback):
    """Callback that logs a run's throughput under names such as ``train/device/samples_per_sec``. See `Throughput`.

    During training, rank zero takes a measurement every ``log_every_n_steps`` steps. Each measurement waits for the
    device to finish its queued work. The time spent in validation is excluded. The throughput of an evaluation is
    logged when the evaluation ends.

    During training, FLOPs are also counted if the task has the attribute ``flops_per_batch``. Set it to the FLOPs of
    one micro-batch, which `measure_flops` can compute. If the peak FLOPs per second of the device are also known, the
    model FLOPs utilization (MFU) is logged as ``train/device/mfu``. MFU is the achieved fraction of the peak.

    Args:
        batch_size_fn: Function that returns the number of samples in a batch. Default: None, which uses the
            dataloader's count.
        length_fn: Function that returns the number of items, such as tokens, in a batch. Default: None, which counts no
            items.
        window_size: Minimum number of batches over which a training rate is computed. Must be at least 2. Default: 100.
        separator: Text between the components of a metric name. Default: ``"/"``.
        available_flops: Peak FLOPs per second of one device. Default: the result of `get_available_flops`.

    Raises:
        ValueError, TypeError: If an argument is invalid.
        ValueError: In any stage, if ``available_flops`` is set but the task has no attribute ``flops_per_batch``. In
            ``fit``, if the Trainer's ``log_every_n_steps`` is 0.

    Examples:
        >>> import tempfile
        >>> import treadle as tl
        >>> from treadle.callbacks import ThroughputMonitor
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> from treadle.loggers import CSVLogger
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trainer = tl.Trainer(
        ...         max_steps=4,
        ...         accelerator="cpu",
        ...         devices=1,
        ...         logger=CSVLogger(folder),
        ...         log_every_n_steps=1,
        ...         callbacks=ThroughputMonitor(window_size=2),
        ...         enable_checkpointing=False,
        ...         enable_progress_bar=False,
        ...     )
        ...     trainer.fit(BoringModel())
        ...     "train/device/samples_per_sec" in open(f"{trainer.log_dir}/metrics.csv").readline()
        True
    """

    exchanges = True

    def __init__(
        self,
        batch_size_fn: Callable[[Any], float] | None = None,
        length_fn: Callable[[Any], float] | None = None,
        *,
        window_size: int = 100,
        separator: str = "/",
        available_flops: float | None = None,
    ) -> None:
        for name, function in (("batch_size_fn", batch_size_fn), ("length_fn", length_fn)):
            if function is not None and not callable(function):
                raise TypeError(f"{name}={function!r} must be a function of a batch.")
        self.batch_size_fn = batch_size_fn
        self.length_fn = length_fn
        self.window_size = check_int("window_size", window_size, 2)
        self.separator = separator
        self.available_flops = (
            None if available_flops is None else check_number("available_flops", available_flops, 1.0)
        )
        self._earlier_seconds = 0.0  # seconds of the runs that this one continues
        self._lengths = 0.0  # items of one device, on average
        self._counted = 0.0  # samples of one device, if this callback counts them
        self._reset()

    def _reset(self) -> None:
        self._throughput: Throughput | None = None
        self._began = self._paused = 0.0
        self._step = -1  # step of the last measurement
        self._local_counts = [0.0, 0.0, 0.0]  # samples, items and operations of this process since that step
        self._must_count = self._has_flops = self._failed = False
        self._evaluation_began: float | None = None
        self._evaluated = 0  # evaluated samples, over all processes
        self._local_evaluation_counts = [0.0, 0.0, 0.0]

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state: the training time in seconds and the counts of samples and items."""
        return {"time": self._compute_elapsed(), "lengths": self._lengths, "samples": self._counted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._earlier_seconds = state_dict["time"]
        self._lengths, self._counted = state_dict["lengths"], state_dict["samples"]

    # -- training ------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Check that the arguments fit the task and the Trainer."""
        super().setup(trainer, pl_module, stage)
        self._reset()
        if stage == "fit" and not trainer.log_every_n_steps:
            raise ValueError(
                "log_every_n_steps=0 does not work with ThroughputMonitor, which measures at that interval. Set "
                "log_every_n_steps to at least 1, or remove the callback."
            )
        self._has_flops = hasattr(pl_module, "flops_per_batch")
        if self.available_flops is not None and not self._has_flops:
            raise ValueError(
                f"ThroughputMonitor(available_flops={self.available_flops!r}) needs the attribute flops_per_batch, "
                f"which {type(pl_module).__name__} does not have. Set it to the result of "
                "treadle.callbacks.measure_flops."
            )
        self._must_count = self._has_flops or self.batch_size_fn is not None or self.length_fn is not None

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Start the training clock."""
        interval = trainer.log_every_n_steps * trainer.accumulate_grad_batches
        self._throughput = self._make_throughput(trainer, 1 + max(1, math.ceil(self.window_size / interval)))
        self._safely(_wait_for, trainer)
        self._began, self._paused, self._step = time.perf_counter(), 0.0, trainer.progress.step
        self._safely(self._measure, trainer)

    def _make_throughput(self, trainer: Trainer, window: int) -> Throughput:
        precision, device = trainer.accelerator.precision, trainer.accelerator.device
        peak = self.available_flops
        if peak is None and self._has_flops:
            dtype = precision.compute or precision.storage or torch.float32
            peak = self._safely(get_available_flops, device, dtype)
            if peak is None and device.type != "cpu":
                warn(
                    f"the peak performance of {device} in {dtype} is unknown, so device{self.separator}mfu is not "
                    "logged. Set ThroughputMonitor(available_flops=...)."
                )
        return Throughput(peak, trainer.world_size, window, self.separator)

    def _compute_elapsed(self) -> float:
        if self._throughput is None or not self._began:
            return self._earlier_seconds
        return self._earlier_seconds + time.perf_counter() - self._began - self._paused

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the samples, items and FLOPs of the batch."""
        if self._must_count:
            self._count(trainer, pl_module, batch, self._local_counts)

    def _count(self, trainer: Trainer, task: TaskModule, batch: Any, counts: list[Any]) -> None:
        """Add a batch's samples, items and FLOPs to ``counts``."""
        if not trainer.accelerator.cursor.micro.samples:  # type: ignore[union-attr]
            return  # a placeholder batch, which keeps the ranks in step
        if self._failed:
            counts[0] = math.nan  # NaN informs all processes in the next measurement
            return
        try:
            with torch.no_grad():
                counts[0] += 0.0 if self.batch_size_fn is None else _as_number(self.batch_size_fn(batch))
                counts[1] += 0.0 if self.length_fn is None else _as_number(self.length_fn(batch))
                counts[2] += float(task.flops_per_batch) if self._has_flops else 0.0  # type: ignore[arg-type]
        except Exception as error:
            counts[0], self._failed = math.nan, True
            warn(f"ThroughputMonitor could not measure a batch and is disabled: {describe_error(error)}")

    def _average_counts(self, trainer: Trainer, numbers: list[Any]) -> list[float] | None:
        world = trainer.accelerator.data_world
        counts: list[float] = read_numbers(numbers)
        if world.size > 1:
            parts = world.all_gather(torch.tensor(counts, dtype=torch.float64, device=world.device))
            counts = torch.stack(list(parts)).sum(0).div(trainer.world_size).tolist()
        return None if math.isnan(counts[0]) else counts

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Measure and log the throughput every ``log_every_n_steps`` steps."""
        step = trainer.progress.step
        if step % trainer.log_every_n_steps == 0 and step != self._step and self._throughput is not None:
            self._step = step
            self._measure_and_write(trainer)

    def _measure_and_write(self, trainer: Trainer) -> None:
        flops = None
        if self._must_count:
            counted, self._local_counts = self._average_counts(trainer, self._local_counts), [0.0, 0.0, 0.0]
            if counted is None:
                self._throughput = None
                return
            self._counted += counted[0]
            self._lengths += counted[1]
            flops = counted[2] if self._has_flops else None
        self._safely(self._measure, trainer, flops)
        self._safely(self._write, trainer, "train", self._throughput)

    def _measure(self, trainer: Trainer, flops: float | None = None) -> None:
        if not trainer.is_global_zero or self._throughput is None:
            return
        _wait_for(trainer)
        progress = trainer.progress
        self._throughput.update(
            time=self._compute_elapsed(),
            batches=progress.batches,
            samples=progress.samples / trainer.world_size if self.batch_size_fn is None else self._counted,
            lengths=None if self.length_fn is None else self._lengths,
            flops=flops,
        )

    def _write(self, trainer: Trainer, stage: str, throughput: Throughput) -> None:
        if trainer.is_global_zero:
            row = {f"{stage}{self.separator}{name}": value for name, value in throughput.compute().items()}
            trainer.logbook.write_row(row, trainer.progress.step, trainer.progress.epoch)

    def on_train_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Stop the training clock."""
        self._earlier_seconds, self._throughput = self._compute_elapsed(), None

    # -- evaluation ----------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Start the clock of the evaluation."""
        if not trainer.sanity_checking:
            self._safely(_wait_for, trainer)
            self._evaluation_began, self._evaluated = time.perf_counter(), 0
            self._local_evaluation_counts = [0.0, 0.0, 0.0]

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Count the samples and items of the batch."""
        if self._evaluation_began is not None:
            self._evaluated += trainer.accelerator.cursor.micro.everyone  # type: ignore[union-attr]
            if self._must_count:
                self._count(trainer, pl_module, batch, self._local_evaluation_counts)

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Log the throughput of the evaluation."""
        if self._evaluation_began is None:
            return
        self._safely(_wait_for, trainer)
        seconds, self._evaluation_began = time.perf_counter() - self._evaluation_began, None
        self._paused += seconds
        counted = self._average_counts(trainer, self._local_evaluation_counts) if self._must_count else [0.0, 0.0, 0.0]
        if counted is not None:
            stage = "validate" if trainer.stage == "fit" else str(trainer.stage)
            self._safely(self._write_evaluation, trainer, stage, seconds, counted)

    on_test_start = on_predict_start = on_validation_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]  # names differ
    on_test_end = on_predict_end = on_validation_end

    def _write_evaluation(self, trainer: Trainer, stage: str, seconds: float, counted: list[float]) -> None:
        # Without operations, because flops_per_batch is that of a training batch.
        throughput = Throughput(None, trainer.world_size, 2, self.separator)
        samples = self._evaluated / trainer.world_size if self.batch_size_fn is None else counted[0]
        none, lengths = (None, None) if self.length_fn is None else (0.0, counted[1])
        throughput.update(time=0.0, batches=0, samples=0, lengths=none)
        throughput.update(time=seconds, batches=trainer.evaluation_batch + 1, samples=samples, lengths=lengths)
        self._write(trainer, stage, throughput)


def _as_number(value: Any) -> Any:
    """Convert a value to a float. A tensor that is not on the CPU is copied instead, to avoid a synchronization."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return value.detach().reshape(()).clone()
    return float(value)


def _wait_for(trainer: Trainer) -> None:
    """Wait until the device has completed its queued work, so that the measured time includes that work."""
    device = trainer.accelerator.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
