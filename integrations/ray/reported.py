"""Checkpoints that Ray keeps, and metrics as Ray takes them."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ...callbacks import Checkpoint

if TYPE_CHECKING:
    from ...trainer import TaskModule, Trainer


class ReportedCheckpoint(Checkpoint):
    """Base of the callbacks that hand checkpoints to Ray: resumes from the one that Ray hands back.

    Args:
        filename: The name of Treadle's checkpoint inside of Ray's.
    """

    after_task = 2
    exchanges = True
    keeper = "Ray"

    def __init__(self, filename: str) -> None:
        super().__init__()
        self._filename = filename
        self._in_use = ExitStack()

    def resume_path(self) -> str | None:
        """See `Checkpoint.resume_path`. A checkpoint of a remote storage is downloaded, once per machine."""
        self._in_use.close()
        checkpoint = self._get_checkpoint()
        if checkpoint is None:
            return None
        return os.path.join(self._in_use.enter_context(checkpoint.as_directory()), self._filename)

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """The run is restored, so a downloaded checkpoint may go."""
        self._in_use.close()

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """The same after another stage, or a failure."""
        self._in_use.close()

    def _get_checkpoint(self) -> Any:
        """Return the ``ray.train.Checkpoint`` to resume from; None for a fresh start."""
        raise NotImplementedError


def collect_metrics(trainer: Trainer) -> dict[str, float]:
    """Return all that was logged as plain numbers, with ``epoch`` and ``step``, the optimizer steps that are done."""
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return values | {"epoch": trainer.current_epoch, "step": trainer.global_step}
