"""What happens around the loop."""

from .callback import HOOKS, Callback
from .early_stopping import EarlyStopping
from .lr_monitor import LearningRateMonitor
from .model_checkpoint import ModelCheckpoint
from .model_summary import ModelSummary, summarize
from .progress_bar import TQDMProgressBar

__all__ = [
    "HOOKS",
    "Callback",
    "EarlyStopping",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "TQDMProgressBar",
    "summarize",
]
