"""Lightning's functions for files: fsspec's file system of a path or URL, and the content of ``torch.save`` files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..trainer import load_checkpoint

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def get_filesystem(path: str | Path, **kwargs: Any) -> AbstractFileSystem:
    """Return fsspec's file system of a path or URL, such as ``"s3://bucket/key"``, with these options."""
    from fsspec.core import url_to_fs  # installed with torch

    file_system, _ = url_to_fs(str(path), **kwargs)
    return file_system


def is_dir(fs: AbstractFileSystem, path: str | Path, strict: bool = False) -> bool:
    """Return whether a path is a folder. ``strict`` is accepted and ignored."""
    return bool(fs.isdir(str(path)))


def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Return the content of a ``torch.save`` file, or of a run's checkpoint directory.

    Libraries import this function as ``pl_load``. By default, no code in a file is run.
    """
    if isinstance(path_or_url, str | os.PathLike) and os.path.isdir(path_or_url):
        return load_checkpoint(path_or_url, map_location)
    return torch.load(path_or_url, map_location=map_location, weights_only=weights_only is None or weights_only)


def lazy_load(filename: str | os.PathLike[str]) -> Any:
    """Return the content of a ``torch.save`` file. The system reads a tensor from the file when the tensor is used."""
    return torch.load(filename, map_location="cpu", weights_only=True, mmap=True)


class NotYetLoadedTensor:
    """Class of tensors that Lightning has not read yet. It has no instances, because `lazy_load` returns tensors."""
