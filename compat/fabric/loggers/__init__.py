"""Fabric's loggers and the other names in Lightning's module."""

from ....common.peer_names import find_peer_names
from ....loggers import Logger
from .csv_logs import CSVLogger
from .tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]

__getattr__ = find_peer_names(__name__)
