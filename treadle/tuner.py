"""Searches for a learning rate and a batch size."""

from .callbacks.lr_finder import _LRFinder
from .trainer.tuner import Tuner

__all__ = ["Tuner", "_LRFinder"]
