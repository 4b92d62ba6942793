"""Lightning's classes that write, read and remove checkpoints, one of which a user may pass to the Trainer.

Such a plugin writes and reads one dict in Lightning's layout. Its entry ``"treadle"`` contains the files that Treadle
resumes from exactly. To read them, they are written to a temporary checkpoint file. Digests and atomic writes are the
plugin's business.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
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
from ...engine.weights import make_parent, write_atomically
from ...strategies import apply_nested
from ...strategies.distributed import make_view_key

__all__ = ["AsyncCheckpointIO", "CheckpointIO", "TorchCheckpointIO"]

ENTRY = "treadle"
"""Key of the entry that Treadle resumes from."""


class CheckpointIO(ABC):
    """Base class of objects that write, read and remove checkpoints."""

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint. Subclasses define the ``storage_options``."""

    @abstractmethod
    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, location: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint and return its content. The options are those of ``torch.load``."""

    @abstractmethod
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint."""

    def teardown(self) -> None:  # noqa: B027  a subclass may have nothing to finish
        """Wait for pending writes. The base class does nothing."""


class TorchCheckpointIO(CheckpointIO):
    """`CheckpointIO` that writes atomically with ``torch.save`` and reads with ``torch.load``.

    It also reads the checkpoint directories of a run.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint to a file, whose folder is created if it is missing. ``storage_options`` must be None."""
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r} is not supported. Remove it.")
        make_parent(Path(path))
        write_atomically(Path(path), partial(torch.save, checkpoint))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, location: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint in a file, or a run's checkpoint as `treadle.load_checkpoint` returns it.

        By default, tensors are loaded to the CPU, and code in the file is not run. With ``weights_only=False``, it is
        run.

        Raises:
            FileNotFoundError: If ``path`` does not exist.
            ValueError: If ``path`` is a directory that does not contain a valid checkpoint.
            pickle.UnpicklingError: If the file contains an object that ``weights_only`` forbids.
        """
        if Path(path).is_dir():
            from ..core import load_checkpoint

            return load_checkpoint(path, map_location)
        if not Path(path).is_file():
            raise FileNotFoundError(f"the checkpoint {str(path)!r} does not exist.")
        checkpoint: dict[str, Any] = torch.load(
            path, map_location=map_location, weights_only=weights_only is None or weights_only
        )
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file or folder if it exists."""
        path = Path(path)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class AsyncCheckpointIO(CheckpointIO):
    """`CheckpointIO` that copies the tensors and then writes checkpoints one after the other in a thread.

    Training can continue during the write. If writes fail, a later call raises the error of the first, at the latest
    `teardown`.

    Args:
        checkpoint_io: The `CheckpointIO` that writes the checkpoints. Default: a `TorchCheckpointIO`.
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        self.checkpoint_io = checkpoint_io or TorchCheckpointIO()
        self._executor: ThreadPoolExecutor | None = None
        self._writes: list[Future[None]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Copy the tensors and write the checkpoint in the thread."""
        self._raise_failures(Future.done)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1)
        copies: dict[tuple[Any, ...], Tensor] = {}  # a tensor that is in the dict twice is copied once

        def copy(tensor: Tensor) -> Tensor:
            key = make_view_key(tensor)
            if key not in copies:
                copies[key] = tensor.detach().clone()
            return copies[key]

        copied = apply_nested(checkpoint, Tensor, copy)
        self._writes.append(
            self._executor.submit(self.checkpoint_io.save_checkpoint, copied, path, storage_options=storage_options)
        )

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Wait for pending writes and return a checkpoint."""
        self._raise_failures(lambda write: True)
        return self.checkpoint_io.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Wait for pending writes and remove a checkpoint."""
        self._raise_failures(lambda write: True)
        self.checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        """Wait for pending writes."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None
        self._raise_failures(lambda write: True)
        self.checkpoint_io.teardown()

    def _raise_failures(self, chosen: Callable[[Future[None]], bool]) -> None:
        ended = [write for write in self._writes if chosen(write)]
        self._writes = [write for write in self._writes if write not in ended]
        for write in ended:
            write.result()


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

    def commit(self, files: Mapping[str, Any], info: Mapping[str, Any], hooked: bool) -> None:
        """Hand the dict to the function."""
        assert self._document is not None
        assert not hooked
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
