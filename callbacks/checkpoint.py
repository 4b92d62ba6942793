"""Base class of user-defined checkpoint callbacks."""

from __future__ import annotations

from .callback import Callback


class Checkpoint(Callback):
    """Base class of user-defined checkpoint callbacks. A Trainer with such a callback does not add a `ModelCheckpoint`.

    Attributes:
        keeper: Name of the external system that stores the checkpoints. If it is not empty, the Trainer calls
            `resume_path` to find the latest checkpoint. Default: "".

    Examples:
        >>> import tempfile
        >>> import treadle as tl
        >>> from treadle.callbacks import Checkpoint
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> class SaveAtEnd(Checkpoint):
        ...     def __init__(self, path):
        ...         self.path = path
        ...     def on_train_end(self, trainer, pl_module):
        ...         trainer.save_checkpoint(self.path)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     callback = SaveAtEnd(f"{folder}/end.ckpt")
        ...     trainer = tl.Trainer(
        ...         max_steps=1,
        ...         accelerator="cpu",
        ...         devices=1,
        ...         logger=False,
        ...         enable_progress_bar=False,
        ...         callbacks=callback,
        ...     )
        ...     trainer.fit(BoringModel())
        ...     tl.load_checkpoint(callback.path)["global_step"]
        1
    """

    keeper: str = ""

    def resume_path(self) -> str | None:
        """Return the path of the checkpoint that ``ckpt_path="last"`` and ``"auto"`` load; None if there is none.

        The result must be the same on every rank.
        """
        return None
