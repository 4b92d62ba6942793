"""Treadle: a trainer framework for PyTorch. Exact, nearly free, unbreakable."""

from . import callbacks, loggers, strategies
from .callbacks import Callback
from .engine import Accelerator, seed_everything
from .trainer import DataModule, TaskModule, Trainer

__version__ = "0.1.0"

__all__ = [
    "Accelerator",
    "Callback",
    "DataModule",
    "TaskModule",
    "Trainer",
    "__version__",
    "callbacks",
    "loggers",
    "seed_everything",
    "strategies",
]
