"""What callbacks that average weights share: who has the averages when, and how they are saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...common.messages import warn
from ..callback import Callback
from .averaged_weights import Averages, resolve_averages_device

if TYPE_CHECKING:
    from ...trainer import TaskModule, Trainer


class Averaging(Callback):
    """A callback whose averages the model has for good once training is over; subclasses say when to average.

    Whatever goes wrong before that, the model gets its own weights back.
    """

    exchanges = True

    _key: str
    """The name, among `averages.KEYS`, that the averages are saved under."""

    _position: tuple[str, ...] = ("latest_epoch",)
    """What is saved beside them: attributes, without the underscore."""

    def __init__(self) -> None:
        self._averages: Averages | None = None
        self._ended = False  # training is over, and the model has the averages
        self._latest_epoch = -1

    def _make_room(self, trainer: Trainer, task: TaskModule, buffers: bool, device: Any, strict: bool) -> None:
        """The model lies as it will be trained: hold its averages.

        Raises:
            ValueError: If the run can't be averaged so, or someone else does it.
        """
        if sum(isinstance(callback, Averaging) for callback in trainer.callbacks) > 1:
            raise ValueError("there are two callbacks that average weights, and a model can end with one average.")
        self._averages = Averages(task, buffers, resolve_averages_device(trainer, device, type(self).__name__, strict))
        self._ended, self._latest_epoch = False, -1

    def _end(self) -> None:
        """Let the model have its own weights, unless training is over."""
        if self._averages is not None and not self._ended:
            self._averages.restore_model()

    def on_exception(self, trainer: Trainer, pl_module: TaskModule, exception: BaseException) -> None:
        """Whatever happened, the model has its own weights again, before anyone saves them."""
        self._ended = False
        self._end()

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Training is over: by success the averages stay."""
        if self._ended and self._averages is not None:
            self._averages.keep_in_model()
        self._end()

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Add the averages."""
        if self._averages is not None:
            position = {name: getattr(self, f"_{name}") for name in self._position}
            checkpoint[self._key] = {**self._averages.state_dict(), "ended": self._ended, **position}

    def added_layout(self) -> dict[str, Any]:
        """See `Callback.added_layout`."""
        return {} if self._averages is None else {self._key: {"weights": self._averages.values}}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Take the averages back."""
        saved = checkpoint.get(self._key)
        if saved is None:
            warn(f"the checkpoint was saved without {type(self).__name__}: averaging begins now.")
            return
        if saved["ended"]:
            warn("the checkpoint was saved when training was over: it goes on from the averaged weights.")
        assert self._averages is not None
        self._averages.load_state_dict(saved)
        for name in self._position:
            setattr(self, f"_{name}", saved[name])
