"""The command line: configurations, commands, and `run`, which makes a script one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .entry_point import COMMANDS, main
    from .script import run

__getattr__, __dir__, __all__ = lazy_exports(__name__)
