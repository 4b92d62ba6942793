"""Checkpoints of a run: saving, committing, verifying, opening and restoring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import atomic_swap, content, filesystem, store
    from .async_save import Job
    from .atomic_swap import forget_saved, recover_interrupted
    from .checkpointer import Checkpointer
    from .content import check_places, note_nan_buffers, refuse_not_finite
    from .filesystem import CODES, Files, TensorFile
    from .json_codec import MAX_DEPTH, Record, check_tensor, decode, encode
    from .model_check import check_frozen, compare_names, compute_digests, find_reshaped, read_frozen_note
    from .one_file import KINDS, is_checkpoint_file, lay_out
    from .open_checkpoint import OpenCheckpoint, find_first_intact, open_together, read_part
    from .parts import (
        ADDED,
        CONFIG,
        DATAMODULE_HPARAMS,
        HPARAMS,
        MANIFEST,
        STATE,
        CheckpointNotFoundError,
        Manifest,
        check_files,
        encode_part,
        extra_part,
        has_part,
        is_checkpoint,
        model_part,
        read_manifest,
    )
    from .restore import compare_weights, load_into_memory
    from .safetensors_file import (
        FilePiece,
        MemoryPiece,
        Piece,
        Stored,
        UnreadTensor,
        Weights,
        abbreviate,
        add_aliases,
        read_mark,
        read_safetensors,
        read_tensor,
        read_whole_model,
    )
    from .store import CheckpointStore, FileSave, JoinedSave, Save
    from .train_state import (
        CallbackStates,
        OptimizerState,
        TrainerStates,
        TrainState,
        check_form,
        open_added,
        open_callback_states,
        open_registered,
    )

__getattr__, __dir__, __all__ = lazy_exports(__name__)
