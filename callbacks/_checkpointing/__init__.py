"""Helpers for `ModelCheckpoint`: when to save, how to name checkpoints, and which checkpoints to keep or remove."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .disk_space import estimate_checkpoint_bytes
    from .filenames import CheckpointFilenames, check_place, folders, is_taken
    from .intervals import AgreedInterval, check_triggers
    from .lightning_aliases import CheckpointAliases
    from .removal import finish_removing, is_abandoned, remove
    from .top_k import STATE, Recorded, TopKCheckpoints, relocate

__getattr__, __dir__, __all__ = lazy_exports(__name__)
