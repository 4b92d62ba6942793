"""Checkpoint as one dict: what a `CheckpointIO` plugin writes and reads, and what other libraries have saved.

The dict has Lightning's layout. One more entry, ``"treadle"``, contains the files that Treadle resumes from exactly. To
read them, they are written to a temporary checkpoint file. Digests and atomic writes are then the plugin's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...common.temporary import temporary_folder
from ...engine.checkpoint import (
    FileSave,
    JoinedSave,
    OpenCheckpoint,
    TensorFile,
    add_aliases,
    decode,
    encode,
    encode_part,
    extra_part,
    lay_out,
    model_part,
)

ENTRY = "treadle"
"""Key of the entry that Treadle resumes from."""


class DictSave(JoinedSave):
    """Save by a function that gets a dict on rank zero; see `engine.checkpoint.store.Save`.

    Args:
        target: Path of the checkpoint.
        write: Function that writes the dict to the path.
        document: The dict in Lightning's layout; None on ranks other than zero.
    """

    def __init__(
        self, target: Path, write: Callable[[dict[str, Any], str], Any], document: dict[str, Any] | None
    ) -> None:
        super().__init__(target, document is not None)
        self._write, self._document = write, document

    def commit(self, files: Mapping[str, Any], info: Mapping[str, Any], others: bool) -> None:
        """Hand the dict to the function."""
        assert self._document is not None
        assert not others
        exact = {
            "info": json.dumps(encode(info, "info")[0]).encode(),
            "files": {name: c if isinstance(c, bytes) else {**c._asdict()} for name, c in self.join(files).items()},
        }
        self._write({**self._document, ENTRY: exact}, str(self.staging))

    def discard(self, is_main: bool) -> None:
        """Do nothing, because the function has written what it has written."""


def open_dict(content: Any, place: str) -> OpenCheckpoint:
    """Return a checkpoint for a dict that a plugin or another library has saved; one of the latter has only weights.

    Args:
        content: The dict.
        place: Path from which it was read, for errors.

    Raises:
        ValueError: If it is not a dict of a checkpoint.
    """
    if not isinstance(content, Mapping) or not isinstance(content.get("state_dict"), Mapping):
        raise ValueError(
            f"{place} has no 'state_dict', so it is not a checkpoint. To load the weights of a model, use "
            "treadle.load_weights."
        )
    weights = {name: value for name, value in content["state_dict"].items() if isinstance(value, Tensor)}
    exact = content.get(ENTRY)
    if isinstance(exact, Mapping):
        info = decode(json.loads(exact["info"]), {})
        files = {name: c if isinstance(c, bytes) else TensorFile(**c) for name, c in exact["files"].items()}
        model = files.get("model.safetensors")
        weights = add_aliases(model.tensors, model.notes) if isinstance(model, TensorFile) else {}
    else:
        info = {"epoch": int(content.get("epoch", 0)), "step": int(content.get("global_step", 0))}
        files = encode_part(model_part(0), weights)
        if extra := {name: value for name, value in content["state_dict"].items() if name not in weights}:
            files |= encode_part(extra_part(0), extra)
    path = temporary_folder(place) / "checkpoint"
    FileSave(path, "", lay_out(files, {"state_dict": weights})).save(files, info)
    return OpenCheckpoint(path)
