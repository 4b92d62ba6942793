"""Base class of the callbacks that average weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...common.messages import warn
from ..callback import Callback
from .averaged_weights import Averages, resolve_averages_device

if TYPE_CHECKING:
    from ...trainer import TaskModule, Trainer


class Averaging(Callback):
    """Callback that keeps averages of the weights and leaves them in the model after training.

    Subclasses decide when to average. If training fails, the model's own weights are restored.
    """

    exchanges = True

    _key: str
    """Name under which the averages are saved, one of `KEYS`."""

    _position: tuple[str, ...] = ("latest_epoch",)
    """Names of further attributes to save with the averages, without their leading underscore."""

    def __init__(self) -> None:
        self._averages: Averages | None = None
        self._ended = False  # training is over, and the averages are in the model
        self._latest_epoch = -1

    def _make_room(self, trainer: Trainer, task: TaskModule, buffers: bool, device: Any, strict: bool) -> None:
        names = [type(callback).__name__ for callback in trainer.callbacks if isinstance(callback, Averaging)]
        if len(names) > 1:
            raise ValueError(
                f"the Trainer has {len(names)} callbacks that average weights ({', '.join(names)}), but only one "
                "callback can set the final weights. Keep one of them."
            )
        self._averages = Averages(task, buffers, resolve_averages_device(trainer, device, type(self).__name__, strict))
        self._ended, self._latest_epoch = False, -1

    def _end(self) -> None:
        if self._averages is not None and not self._ended:
            self._averages.restore_model()

    def on_exception(self, trainer: Trainer, pl_module: TaskModule, exception: BaseException) -> None:
        """Restore the model's own weights."""
        self._ended = False
        self._end()

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Keep the averages in the model after successful training, otherwise the model's own weights."""
        if self._ended and self._averages is not None:
            self._averages.keep_in_model()
        self._end()

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Add the averages, if any, to the checkpoint."""
        if self._averages is not None:
            position = {name: getattr(self, f"_{name}") for name in self._position}
            checkpoint[self._key] = {**self._averages.state_dict(), "ended": self._ended, **position}

    def added_layout(self) -> dict[str, Any]:
        """Return tensors with the names and sharding of the averages."""
        return {} if self._averages is None else {self._key: {"weights": self._averages.values}}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Restore the averages, if the checkpoint has any."""
        saved = checkpoint.get(self._key)
        if saved is None:
            warn(f"the checkpoint was saved without {type(self).__name__}, so averaging starts with this run.")
            return
        if saved["ended"]:
            warn("the checkpoint was saved after training ended, so training continues from the averaged weights.")
        assert self._averages is not None
        self._averages.load_state_dict(saved)
        for name in self._position:
            setattr(self, f"_{name}", saved[name])
