"""`OnExceptionCheckpoint`: saves a checkpoint when an error or a signal ends the run."""

from __future__ import annotations

import os
from pathlib import Path

from .model_checkpoint import ModelCheckpoint


class OnExceptionCheckpoint(ModelCheckpoint):
    """Callback that saves the run as of the last completed step, but only when an error or a signal ends ``fit``.

    The callback works like a `ModelCheckpoint` with ``save_on_exception=True`` and no other trigger. It replaces an
    older checkpoint that has the same name. After a signal other than Ctrl-C, such as SIGTERM, only the first callback
    that saves full checkpoints saves the run. If this callback is the first, its checkpoint is named
    ``preempted.ckpt``. To resume from the latest checkpoint, call ``fit(ckpt_path="auto")``.

    Args:
        dirpath: Directory of the checkpoint, or its URL.
        filename: Name of the checkpoint without the extension. It must not contain fields, such as ``{epoch}``.
            Default: ``"on_exception"``.

    Raises:
        ValueError, TypeError: If an argument is invalid.

    Examples:
        >>> import os
        >>> from treadle.callbacks import OnExceptionCheckpoint
        >>> os.path.basename(OnExceptionCheckpoint("checkpoints").ckpt_path)
        'on_exception.ckpt'
    """

    def __init__(self, dirpath: str | Path, filename: str = "on_exception") -> None:
        if not filename:
            raise ValueError(f"filename={filename!r} must be a name, such as 'on_exception'.")
        super().__init__(dirpath, filename, every_n_epochs=0, save_on_exception=True, enable_version_counter=False)
        if "{" in filename:
            raise ValueError(
                f"filename={filename!r} contains a field, but OnExceptionCheckpoint always saves under the same name. "
                "Remove the field."
            )

    @property
    def state_key(self) -> str:
        """Name under which the state is saved. It includes the class and ``filename``."""
        return f"{type(self).__qualname__}({self.filename!r})"

    @property
    def ckpt_path(self) -> str:
        """Path of the checkpoint that is saved after an error or Ctrl-C."""
        return os.path.join(self._directory, f"{self.filename}{self.FILE_EXTENSION}")
