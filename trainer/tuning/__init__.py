"""Searches that precede a stage, for a learning rate or a batch size, on a copy of the task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .searches import run_searches, search_again
    from .tuner import Tuner

__getattr__, __dir__, __all__ = lazy_exports(__name__)
