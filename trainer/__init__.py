"""The task, its data, and the Trainer that runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import arguments
    from .core.datamodule import DataModule
    from .core.loading import load_checkpoint
    from .core.task import TaskModule
    from .default_callbacks import as_callbacks
    from .loop.progress import Progress
    from .trainer import Trainer

__getattr__, __dir__, __all__ = lazy_exports(__name__)
