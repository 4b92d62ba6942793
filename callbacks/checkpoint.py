"""Base class of the callbacks that save checkpoints."""

from __future__ import annotations

from .callback import Callback


class Checkpoint(Callback):
    """Base of a user-defined checkpoint callback. With one of them the Trainer adds no `ModelCheckpoint`."""
