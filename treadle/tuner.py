"""Searches for a learning rate and a batch size."""

from .callbacks import _LRFinder
from .common.peer_names import find_peer_names
from .trainer.tuning import Tuner

__all__ = ["Tuner", "_LRFinder"]

__getattr__ = find_peer_names(__name__)
