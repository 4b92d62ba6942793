"""Write predictions away as they are made, with the places of their samples in the dataset."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ..common.validation import choose
from ..engine import move_data_to_device
from ..engine.data import batch_indices
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class WriteInterval(StrEnum):
    """When a `BasePredictionWriter` writes."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """True if `BasePredictionWriter.write_on_batch_end` is called."""
        return self in (WriteInterval.BATCH, WriteInterval.BATCH_AND_EPOCH)

    @property
    def on_epoch(self) -> bool:
        """True if `BasePredictionWriter.write_on_epoch_end` is called."""
        return self in (WriteInterval.EPOCH, WriteInterval.BATCH_AND_EPOCH)


class BasePredictionWriter(Callback):
    """The base of what writes predictions: override `write_on_batch_end`, `write_on_epoch_end` or both.

    Each process writes its own: name files by ``trainer.global_rank``. The indices tell where each sample is in the
    dataset, whatever the sampler and the number of processes; over all processes each comes once, if the sampler
    yields it once. With ``trainer.predict(..., return_predictions=False)`` and ``"batch"`` nothing is kept in memory,
    however long the data is. An error in writing ends the prediction: what it is for is lost.

    Args:
        write_interval: ``"batch"``, ``"epoch"`` (which keeps all predictions of a process in host memory until then)
            or ``"batch_and_epoch"``.

    Raises:
        ValueError: For another interval, or where the method that it calls is not overridden.
    """

    def __init__(self, write_interval: str = "batch") -> None:
        self.interval = WriteInterval(choose("write_interval", write_interval, tuple(map(str, WriteInterval))))
        for name, when in (("write_on_batch_end", "batch"), ("write_on_epoch_end", "epoch")):
            if when in self.interval and getattr(type(self), name) is getattr(BasePredictionWriter, name):
                raise ValueError(f"write_interval={write_interval!r} needs {type(self).__name__} to have a {name}.")
        self._predictions: list[list[Any]] = []
        self._indices: list[list[list[Any] | None]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: TaskModule,
        prediction: Any,
        batch_indices: Sequence[Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write one batch.

        Args:
            trainer: The trainer.
            pl_module: The task.
            prediction: What ``predict_step`` returned.
            batch_indices: What the loader's sampler yielded for each of its samples: their indices in the dataset.
                None for a stream, which has none.
            batch: The batch.
            batch_idx: Its number, among those of this process.
            dataloader_idx: Its loader's number.
        """

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: TaskModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write all batches of this process.

        Args:
            trainer: The trainer.
            pl_module: The task.
            predictions: What ``predict_step`` returned for each, in host memory; for several loaders a list of these.
            batch_indices: For each loader, for each batch, as `write_on_batch_end` gets them.
        """

    def on_predict_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Begin with no predictions."""
        loaders = _get_loaders(trainer)
        self._predictions, self._indices = [[] for _ in loaders], [[] for _ in loaders]

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Write the batch, or keep what is written later."""
        indices = batch_indices(_get_loaders(trainer)[dataloader_idx])
        if not trainer.accelerator.cursor.micro.samples:  # type: ignore[union-attr]
            return  # a stand-in, which keeps the processes in step: its sample is another process's
        if self.interval.on_batch:
            self.write_on_batch_end(trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.interval.on_epoch:
            self._predictions[dataloader_idx].append(move_data_to_device(outputs, "cpu"))
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Write all of them."""
        if self.interval.on_epoch:
            predictions = self._predictions
            self.write_on_epoch_end(
                trainer, pl_module, predictions[0] if len(predictions) == 1 else predictions, self._indices
            )

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Let go of what was kept."""
        self._predictions, self._indices = [], []


def _get_loaders(trainer: Trainer) -> Any:
    assert trainer.sources is not None
    return trainer.sources.evaluation("predict")
