"""Plugins for ``Trainer(plugins=...)``."""

from .common.peer_names import find_peer_names
from .strategies import Precision, TorchSyncBatchNorm

__all__ = ["Precision", "TorchSyncBatchNorm"]

__getattr__ = find_peer_names(__name__)
