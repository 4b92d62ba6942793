"""Base class of the callbacks that save checkpoints."""

from __future__ import annotations

from .callback import Callback


class Checkpoint(Callback):
    """Base of a user-defined checkpoint callback. With one of them the Trainer adds no `ModelCheckpoint`.

    Attributes:
        keeper: Who keeps its checkpoints, in a word, where that is no folder that the Trainer searches by itself; ""
            otherwise.
    """

    keeper: str = ""

    def resume_path(self) -> str | None:
        """Return the checkpoint that ``ckpt_path="last"`` and ``"auto"`` mean, if ``keeper`` has one.

        Called on all ranks, and must be the same on all of them.
        """
        return None
