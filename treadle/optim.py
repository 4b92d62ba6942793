"""Optimizers and learning rate schedules: Muon with AdamW, and schedules by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .engine.optim import lr_schedule, muon_with_adamw

__getattr__, __dir__, __all__ = lazy_exports(__name__)
