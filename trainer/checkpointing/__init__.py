"""The Trainer's checkpointing: saving its state, choosing the checkpoint to resume from, and saving after a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .checkpoint_io import CheckpointIO, TorchCheckpointIO
    from .resolve import CheckpointResolver, find_resumable
    from .snapshots import LastStep, ValidationSnapshot, explain_need_of_all_ranks
    from .trainer_state import TrainerCheckpointer, collect_callback_states
    from .words import WORDS_FOR_CHECKPOINTS

__getattr__, __dir__, __all__ = lazy_exports(__name__)
