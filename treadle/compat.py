"""Lightning's own names, for scripts in which only the import is to change: ``import treadle.compat as pl``."""

from __future__ import annotations

from . import __version__, callbacks, loggers, plugins, profilers, strategies, tuner, utilities
from .callbacks import Callback
from .engine import seed_everything
from .trainer import DataModule, TaskModule, Trainer

LightningModule = TaskModule
LightningDataModule = DataModule

__all__ = [
    "Callback",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "__version__",
    "callbacks",
    "loggers",
    "plugins",
    "profilers",
    "seed_everything",
    "strategies",
    "tuner",
    "utilities",
]
