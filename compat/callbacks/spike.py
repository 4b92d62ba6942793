"""`SpikeDetection`, a callback that ends a run when a loss spikes."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...callbacks import Callback
from ...common.peer_names import find_peer_names
from ...common.validation import check_int, choose

if TYPE_CHECKING:
    from ...trainer import TaskModule, Trainer


class TrainingSpikeException(RuntimeError):
    """Error raised on every rank when the loss spikes on any rank.

    Args:
        batch_idx: Index, within the epoch, of the batch whose loss spiked.
        *args: Further arguments of ``RuntimeError``.
    """

    def __init__(self, batch_idx: int, *args: Any) -> None:
        super().__init__(f"Training spike detected in batch {batch_idx}", *args)
        self.batch_idx = batch_idx


class SpikeDetection(Callback):
    """Callback that ends training with a `TrainingSpikeException` when a batch's loss spikes on any rank.

    The indices of that batch and of the previous one, which may have damaged the weights, are added to ``bad_batches``
    and to a JSON file. A finite loss spikes if it is worse than the previous finite loss and differs from the running
    mean by at least ``atol`` and by at least ``rtol`` times the mean. The callback waits for the device in every batch;
    `SpikeWatch` waits less often.

    Args:
        mode: ``"min"`` (default) if a lower loss is better, or ``"max"``.
        window: Maximum number of previous batches in the running mean. Default: 10.
        warmup: Number of batches at the start of each epoch that never count as spikes. Default: 1.
        atol: The minimum difference from the mean for a spike. Default: None, any difference.
        rtol: The minimum difference from the mean for a spike, as a multiple of the mean; None for any. Default: 2.0.
        exclude_batches_path: Path of the JSON file, which must end in ``.json``, or of a folder for
            ``skip_batches.json``. Default: the Trainer's ``default_root_dir``.
        finite_only: Whether a loss that is not finite counts as a spike. Default: True.

    Attributes:
        bad_batches: Indices of each spiking batch and of the batch before it.
    """

    exchanges = True

    def __init__(
        self,
        mode: str = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | Path | None = None,
        finite_only: bool = True,
    ) -> None:
        self.mode = choose("mode", mode, ("min", "max"))
        self.window = check_int("window", window, 1)
        self.warmup = check_int("warmup", warmup, 0)
        self.atol, self.rtol = atol, rtol
        self.exclude_batches_path = exclude_batches_path
        self.finite_only = finite_only
        self.bad_batches: list[int] = []
        self.last_val = 0.0
        self._recent: deque[float] = deque(maxlen=window)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Raise a `TrainingSpikeException` if the batch's loss spiked on any rank."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"SpikeDetection needs the loss of each batch, but training_step returned none in batch {batch_idx}. "
                "Return the loss, or remove the callback."
            )
        value = float(loss.detach())
        if trainer.accelerator.world.any(batch_idx >= self.warmup and self._is_spike(value)):
            self.bad_batches += range(max(batch_idx - 1, 0), batch_idx + 1)
            self._write(trainer)
            raise TrainingSpikeException(batch_idx)
        if math.isfinite(value):  # one that is not would hide the spikes of the whole window
            self._recent.append(value)
            self.last_val = value

    def _is_spike(self, value: float) -> bool:
        if self.finite_only and not math.isfinite(value):
            return True
        if value <= self.last_val if self.mode == "min" else value >= self.last_val:
            return False
        mean = sum(self._recent) / len(self._recent) if self._recent else math.nan
        distance = abs(value - mean)
        exceeds_atol = self.atol is None or distance >= abs(self.atol)
        return exceeds_atol and (self.rtol is None or distance >= abs(self.rtol * mean))

    def _write(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero:
            return
        path = Path(self.exclude_batches_path or trainer.default_root_dir)
        if path.suffix != ".json":
            path = path / "skip_batches.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        # A run that is restarted after a spike continues from a checkpoint that does not know this spike.
        earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        bad_batches = [*earlier, *(index for index in self.bad_batches if index not in earlier)]
        path.write_text(json.dumps(bad_batches, indent=4), encoding="utf-8")

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {"bad_batches": self.bad_batches, "last_val": self.last_val, "recent": list(self._recent)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        self.bad_batches, self.last_val = list(state_dict["bad_batches"]), state_dict["last_val"]
        self._recent = deque(state_dict["recent"], maxlen=self.window)


__getattr__ = find_peer_names(__name__)
