"""Detection of loss spikes in a `Fabric`'s loop."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..callbacks.spike import SpikeDetection as TrainerSpikeDetection

if TYPE_CHECKING:
    from .fabric import Fabric


class SpikeDetection(TrainerSpikeDetection):
    """Counterpart of `treadle.compat.callbacks.spike.SpikeDetection` for a Fabric's loop.

    Call ``fabric.call("on_train_batch_end", fabric=fabric, loss=loss, batch=batch, batch_idx=batch_idx)`` on all ranks
    after each batch. The default of ``exclude_batches_path`` is the current folder.
    """

    def on_train_batch_end(  # type: ignore[override]
        self, fabric: Fabric, loss: Tensor, batch: Any, batch_idx: int
    ) -> None:
        """Raise a `TrainingSpikeException` if the batch's loss spiked on any rank."""
        self.exclude_batches_path = self.exclude_batches_path or os.getcwd()
        super().on_train_batch_end(fabric, None, loss, batch, batch_idx)  # type: ignore[arg-type]
