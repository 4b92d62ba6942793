"""The machinery under both doors: data, accumulation, exchange, metrics, random state, checkpoints."""

from .accelerator import Accelerator
from .checkpoint import CheckpointStore
from .loader import Loader
from .metrics import Entry, Metrics
from .move import move_data_to_device
from .random_state import isolated_random_state, random_state, seed_everything, set_random_state

__all__ = [
    "Accelerator",
    "CheckpointStore",
    "Entry",
    "Loader",
    "Metrics",
    "isolated_random_state",
    "move_data_to_device",
    "random_state",
    "seed_everything",
    "set_random_state",
]
