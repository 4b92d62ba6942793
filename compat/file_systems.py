"""File systems by their addresses, as fsspec knows them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def get_filesystem(path: str | Path, **kwargs: Any) -> AbstractFileSystem:
    """Return the file system of a path or an address, such as ``"s3://bucket/key"``.

    Args:
        path: where something lies.
        kwargs: settings of that file system.

    Raises:
        ValueError: for a protocol that fsspec does not know.
        ImportError: where the protocol's package is missing.
    """
    from fsspec.core import url_to_fs  # torch brings it

    file_system, _ = url_to_fs(str(path), **kwargs)
    return file_system
