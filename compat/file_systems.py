"""Selection of fsspec's file system for a path or URL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def get_filesystem(path: str | Path, **kwargs: Any) -> AbstractFileSystem:
    """Return fsspec's file system of a path or URL, such as ``"s3://bucket/key"``, with these options."""
    from fsspec.core import url_to_fs  # installed with torch

    file_system, _ = url_to_fs(str(path), **kwargs)
    return file_system
