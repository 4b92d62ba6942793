"""Checkpoints in an object store, each uploaded next to the previous one and committed by one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .download import Download
    from .folder import check_files, check_target, check_writable, find_checkpoints, recover, remove
    from .upload import Upload, clear_staging, open_staging

__getattr__, __dir__, __all__ = lazy_exports(__name__)
