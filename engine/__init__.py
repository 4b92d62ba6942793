"""The machinery under both doors: data, accumulation, exchange, metrics, random state, checkpoints."""

from .accelerator import Accelerator
from .batch_size import find_executable_batch_size
from .checkpoint import CheckpointStore
from .combined import CombinedLoader
from .joint import JointLoader
from .loader import Loader
from .local_sgd import LocalSGD
from .metrics import Entry, Metrics
from .move import move_data_to_device
from .partial_state import AcceleratorState, GradientState, PartialState
from .random_state import isolated_random_state, random_state, seed_everything, set_random_state
from .rank_logging import get_logger

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "CheckpointStore",
    "CombinedLoader",
    "Entry",
    "GradientState",
    "JointLoader",
    "Loader",
    "LocalSGD",
    "Metrics",
    "PartialState",
    "find_executable_batch_size",
    "get_logger",
    "isolated_random_state",
    "move_data_to_device",
    "random_state",
    "seed_everything",
    "set_random_state",
]
