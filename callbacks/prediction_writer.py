"""Base class of callbacks that write predictions."""

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
    """Interval at which a `BasePredictionWriter` writes."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """True if predictions are written after each batch."""
        return self in (WriteInterval.BATCH, WriteInterval.BATCH_AND_EPOCH)

    @property
    def on_epoch(self) -> bool:
        """True if predictions are written at the end of the epoch."""
        return self in (WriteInterval.EPOCH, WriteInterval.BATCH_AND_EPOCH)


class BasePredictionWriter(Callback):
    """Base class of callbacks that write predictions. Override `write_on_batch_end`, `write_on_epoch_end` or both.

    Each process writes its own predictions, so include ``trainer.global_rank`` in file names. The batch indices that
    these methods receive locate each sample in the dataset, for any sampler and any world size. They are None if the
    dataset is streamed or the dataloader is a `CombinedLoader`. An error while writing ends the stage.

    Args:
        write_interval: Write after each batch (``"batch"``), at the end of the epoch (``"epoch"``) or both
            (``"batch_and_epoch"``). The last two keep all predictions of a process in host memory until the epoch ends.
            Default: ``"batch"``.

    Raises:
        ValueError: If the interval is unknown, or if no method that it calls is overridden.

    Examples:
        >>> import treadle as tl
        >>> from treadle.callbacks import BasePredictionWriter
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> class PrintIndices(BasePredictionWriter):
        ...     def write_on_batch_end(
        ...         self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx
        ...     ):
        ...         print(batch_indices, tuple(prediction.shape))
        >>> trainer = tl.Trainer(
        ...     limit_predict_batches=2, accelerator="cpu", devices=1, barebones=True, callbacks=PrintIndices()
        ... )
        >>> trainer.predict(BoringModel(), return_predictions=False)
        [0] (1, 2)
        [1] (1, 2)
    """

    def __init__(self, write_interval: str = "batch") -> None:
        self.interval = WriteInterval(choose("write_interval", write_interval, tuple(map(str, WriteInterval))))
        whens = [when for when in ("batch", "epoch") if when in self.interval]
        # A subclass may also do all of it in the hook that calls the method.
        names = [name for when in whens for name in (f"write_on_{when}_end", f"on_predict_{when}_end")]
        if all(getattr(type(self), name) is getattr(BasePredictionWriter, name) for name in names):
            raise ValueError(
                f"write_interval={write_interval!r} needs the method {names[0]}. Define it in {type(self).__name__}."
            )
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
        """Write the predictions of one batch.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            prediction: The result of ``predict_step``.
            batch_indices: Indices of the batch's samples in the dataset, or None.
            batch: The batch.
            batch_idx: Index of the batch on this process.
            dataloader_idx: Index of the dataloader.
        """

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: TaskModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write the predictions of all batches of this process.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            predictions: List of the results of ``predict_step``, in host memory. With several dataloaders, a list that
                contains one such list for each.
            batch_indices: For each dataloader and each batch, the indices that `write_on_batch_end` receives.
        """

    def on_predict_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Discard predictions of an earlier stage."""
        loaders = get_loaders(trainer)
        self._predictions, self._indices = [[] for _ in loaders], [[] for _ in loaders]

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Write or collect the predictions of the batch."""
        indices = batch_indices(get_loaders(trainer)[dataloader_idx])
        if not trainer.accelerator.cursor.micro.samples:  # type: ignore[union-attr]
            return  # a placeholder batch, which keeps the ranks in step: its sample belongs to another process
        if self.interval.on_batch:
            self.write_on_batch_end(trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.interval.on_epoch:
            self._predictions[dataloader_idx].append(move_data_to_device(outputs, "cpu"))
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Write all collected predictions."""
        if self.interval.on_epoch:
            predictions = self._predictions
            self.write_on_epoch_end(
                trainer, pl_module, predictions[0] if len(predictions) == 1 else predictions, self._indices
            )

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Discard the collected predictions."""
        self._predictions, self._indices = [], []


def get_loaders(trainer: Trainer) -> Any:
    """Return the prepared dataloaders of ``predict``."""
    return trainer.sources.evaluation("predict")
