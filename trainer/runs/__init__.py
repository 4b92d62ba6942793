"""Run folders, `runs/<name>/<number>/`, with their lock and their content."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import index
    from .file_names import CHECKPOINTS, CONFIG, RECORD
    from .folder import RunFolder, check_name
    from .index import WAITING, Run, locate, read
    from .lock import RunLock, holder

__getattr__, __dir__, __all__ = lazy_exports(__name__)
