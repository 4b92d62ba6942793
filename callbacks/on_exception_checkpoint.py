"""Save the run when an error ends it."""

from __future__ import annotations

import os
from pathlib import Path

from .model_checkpoint import ModelCheckpoint


class OnExceptionCheckpoint(ModelCheckpoint):
    """Saves the run as it was after the last completed step when an error or Ctrl-C ends ``fit``, and never else.

    What ``ModelCheckpoint(save_on_exception=True)`` does, under a name that is always the same: an older one is
    replaced. It is in addition to the Trainer's other checkpoints. To go on from it, or from another one if that is
    newer, say ``fit(ckpt_path="auto")``. It acts with them (``after_task`` is 2), when others have put the model in
    order.

    Args:
        dirpath: Where to.
        filename: Its name, without the extension.

    Raises:
        ValueError: For no name.
    """

    def __init__(self, dirpath: str | Path, filename: str = "on_exception") -> None:
        if not filename:
            raise ValueError("filename='' must be a name, such as 'on_exception'.")
        super().__init__(dirpath, filename, every_n_epochs=0, save_on_exception=True, enable_version_counter=False)

    @property
    def state_key(self) -> str:
        """See `Callback.state_key`."""
        return f"OnExceptionCheckpoint({self.filename!r})"

    @property
    def ckpt_path(self) -> str:
        """Where it is saved."""
        return os.path.join(self._directory, f"{self.filename}{self.FILE_EXTENSION}")
