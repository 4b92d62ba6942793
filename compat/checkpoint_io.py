"""Single-file checkpoints, written and read by a script itself; a run's own checkpoints have one format."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from ..trainer import load_checkpoint

__all__ = ["AsyncCheckpointIO", "CheckpointIO", "TorchCheckpointIO"]


class CheckpointIO(ABC):
    """Writes, reads and removes checkpoints."""

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint."""

    @abstractmethod
    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, location: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return a checkpoint."""

    @abstractmethod
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint."""

    def teardown(self) -> None:  # noqa: B027  a subclass may have nothing to finish
        """Finish what is under way."""


class TorchCheckpointIO(CheckpointIO):
    """Writes with ``torch.save``, in one move, and reads with ``torch.load``; checkpoints of a run are read too."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint to a file; its folder is made.

        Args:
            checkpoint: what to write.
            path: the file.
            storage_options: only None.

        Raises:
            TypeError: for ``storage_options``.
        """
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r} is not supported; leave it out.")
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            torch.save(checkpoint, part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, location: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint in a file, or one of a run as `treadle.load_checkpoint` returns it.

        Args:
            path: the file, or the directory of a run's checkpoint.
            map_location: see ``torch.load``; the host's memory by default.
            weights_only: see ``torch.load``, whose default holds: data only. False runs code that is in the file.

        Raises:
            FileNotFoundError: if there is no file.
        """
        if Path(path).is_dir():
            return load_checkpoint(path, map_location if isinstance(map_location, str | torch.device) else None)
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no checkpoint {str(path)!r}.")
        checkpoint: dict[str, Any] = torch.load(
            path, map_location=map_location, weights_only=weights_only is None or weights_only
        )
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file, or a folder, if it is there."""
        path = Path(path)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class AsyncCheckpointIO(CheckpointIO):
    """Writes in a thread, one checkpoint after the other. What it writes is copied first, so training may go on.

    Args:
        checkpoint_io: what writes. Default: a `TorchCheckpointIO`.

    Raises:
        Exception: what a write failed with, in the next call or in `teardown`.
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        self.checkpoint_io = checkpoint_io or TorchCheckpointIO()
        self._executor: ThreadPoolExecutor | None = None
        self._writes: list[Future[None]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """See `CheckpointIO.save_checkpoint`; returns once the tensors are copied."""
        self._raise_failures(Future.done)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1)
        copied = apply_to_collection(checkpoint, torch.Tensor, lambda t: t.detach().clone())
        self._writes.append(
            self._executor.submit(self.checkpoint_io.save_checkpoint, copied, path, storage_options=storage_options)
        )

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See `CheckpointIO.load_checkpoint`; waits for what is being written."""
        self._raise_failures(lambda write: True)
        return self.checkpoint_io.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: str | Path) -> None:
        """See `CheckpointIO.remove_checkpoint`; waits for what is being written."""
        self._raise_failures(lambda write: True)
        self.checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        """Wait for what is being written."""
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
