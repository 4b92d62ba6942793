"""Base of the callbacks that report to Ray."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ...callbacks import Checkpoint

if TYPE_CHECKING:
    from ...trainer import TaskModule, Trainer


class ReportedCheckpoint(Checkpoint):
    """Base class of callbacks that pass checkpoints to Ray and resume from the one that Ray returns.

    Args:
        filename: Name of Treadle's checkpoint inside Ray's checkpoint.
    """

    after_task = 2
    exchanges = True
    keeper = "Ray"

    def __init__(self, filename: str) -> None:
        super().__init__()
        self._filename = filename
        self._in_use = ExitStack()

    def resume_path(self) -> str | None:
        """Return the path of the checkpoint to resume from, or None."""
        self._in_use.close()
        checkpoint = self._get_checkpoint()
        if checkpoint is None:
            return None
        return os.path.join(self._in_use.enter_context(checkpoint.as_directory()), self._filename)

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Delete a downloaded checkpoint, because the run has been restored."""
        self._in_use.close()

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Delete a downloaded checkpoint."""
        self._in_use.close()

    def _get_checkpoint(self) -> Any:
        """Return the ``ray.train.Checkpoint`` to resume from, or None."""
        raise NotImplementedError


def collect_metrics(trainer: Trainer) -> dict[str, float]:
    """Return all logged values as floats, with the epoch's index as ``epoch`` and the optimizer step as ``step``."""
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return values | {"epoch": trainer.current_epoch, "step": trainer.global_step}
