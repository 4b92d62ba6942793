"""Searches for a learning rate and a batch size."""

from .callbacks import _LRFinder
from .trainer.tuning import Tuner

__all__ = ["Tuner", "_LRFinder"]
