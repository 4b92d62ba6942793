"""Searches for a learning rate and a batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .callbacks import _LRFinder
    from .trainer.tuning import Tuner

__getattr__, __dir__, __all__ = lazy_exports(__name__)
