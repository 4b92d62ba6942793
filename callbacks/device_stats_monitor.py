"""`DeviceStatsMonitor`: logs device memory and CPU utilization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..common.optional import require
from ..common.validation import check_bool
from .best_effort import BestEffortCallback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class DeviceStatsMonitor(BestEffortCallback):
    """Callback that logs device statistics every ``log_every_n_steps`` steps, at the start and the end of the step.

    On a CUDA GPU, the statistics are those of ``torch.cuda.memory_stats``. Each name consists of the class, the hook
    and the statistic, such as ``DeviceStatsMonitor.on_train_batch_end/cpu_percent``. In validation and testing, the
    statistics are logged every ``log_every_n_steps`` batches; in prediction, they are not logged. Only the statistics
    of rank zero are logged.

    Args:
        cpu_stats: Whether to log CPU statistics. Default: None, which logs them only if the device is the CPU.

    Raises:
        TypeError: If ``cpu_stats`` is not a bool or None.
        ModuleNotFoundError: If CPU statistics are to be logged and the package ``psutil`` is not installed.
        ValueError: In ``fit``, if the Trainer does not have a logger or ``log_every_n_steps`` is 0.

    Examples:
        >>> import tempfile
        >>> import treadle as tl
        >>> from treadle.callbacks import DeviceStatsMonitor
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> from treadle.loggers import CSVLogger
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trainer = tl.Trainer(
        ...         max_steps=2,
        ...         accelerator="cpu",
        ...         devices=1,
        ...         logger=CSVLogger(folder),
        ...         log_every_n_steps=1,
        ...         callbacks=DeviceStatsMonitor(cpu_stats=False),
        ...         enable_checkpointing=False,
        ...         enable_progress_bar=False,
        ...     )
        ...     trainer.fit(BoringModel())
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self.cpu_stats = None if cpu_stats is None else check_bool("cpu_stats", cpu_stats)
        if cpu_stats:
            require("DeviceStatsMonitor(cpu_stats=True)", "psutil", extra="psutil")
        self._every = 0
        self._begun = self._ended = -1  # the last logged steps
        self._with_cpu = False

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Check the settings and select the statistics to log."""
        super().setup(trainer, pl_module, stage)
        on_cpu = trainer.accelerator.device.type == "cpu"
        self._with_cpu = on_cpu if self.cpu_stats is None else self.cpu_stats
        if self._with_cpu:
            require("DeviceStatsMonitor on a CPU", "psutil", extra="psutil")
        if stage == "fit" and not trainer.loggers:
            raise ValueError(
                "DeviceStatsMonitor needs a logger, but the Trainer has none. Set Trainer(logger=True), or remove the "
                "callback."
            )
        if stage == "fit" and not trainer.log_every_n_steps:
            raise ValueError(
                "log_every_n_steps=0 does not work with DeviceStatsMonitor, which measures at that interval. Set "
                "log_every_n_steps to at least 1, or remove the callback."
            )
        self._begun = self._ended = trainer.progress.step
        should_log = trainer.is_global_zero and trainer.loggers and (self._with_cpu or not on_cpu)
        self._every = trainer.log_every_n_steps if should_log else 0
        if self._with_cpu and should_log:
            self._safely(read_cpu_stats)  # percentages cover the time since the previous call

    def on_train_batch_start(self, trainer: Trainer, pl_module: TaskModule, batch: Any, batch_idx: int) -> None:
        """Log the statistics if they are due."""
        step = trainer.progress.step + 1
        if self._every and step % self._every == 0 and step != self._begun:
            self._begun = step
            self._safely(self._write, trainer, "on_train_batch_start", step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the statistics if they are due."""
        step = trainer.progress.step
        if self._every and step % self._every == 0 and step != self._ended:
            self._ended = step
            self._safely(self._write, trainer, "on_train_batch_end", step)

    def on_validation_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Log the statistics if they are due."""
        self._write_evaluation(trainer, "on_validation_batch_start")

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Log the statistics if they are due."""
        self._write_evaluation(trainer, "on_validation_batch_end")

    def on_test_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Log the statistics if they are due."""
        self._write_evaluation(trainer, "on_test_batch_start")

    def on_test_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Log the statistics if they are due."""
        self._write_evaluation(trainer, "on_test_batch_end")

    def _write_evaluation(self, trainer: Trainer, moment: str) -> None:
        if self._every and not trainer.sanity_checking and (trainer.evaluation_batch + 1) % self._every == 0:
            self._safely(self._write, trainer, moment, trainer.progress.step)

    def _write(self, trainer: Trainer, moment: str, step: int) -> None:
        stats = read_device_stats(trainer.accelerator.device) | (read_cpu_stats() if self._with_cpu else {})
        row = {f"{type(self).__qualname__}.{moment}/{name}": value for name, value in stats.items()}
        trainer.logbook.call_loggers("log_metrics", {"epoch": trainer.progress.epoch, **row}, step=step)


def read_device_stats(device: torch.device) -> dict[str, float]:
    """Return the memory allocator's statistics for a device by name, without synchronizing with it.

    The dict is empty for devices other than CUDA and MPS.

    Args:
        device: The device.
    """
    if device.type == "cuda":
        return dict(torch.cuda.memory_stats(device))
    if device.type == "mps":
        return {
            "current_allocated_memory": torch.mps.current_allocated_memory(),
            "driver_allocated_memory": torch.mps.driver_allocated_memory(),
        }
    return {}


def read_cpu_stats() -> dict[str, float]:
    """Return the utilization of CPU, memory and swap in percent, by name. Requires ``psutil``."""
    import psutil

    return {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }
