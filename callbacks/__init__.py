"""What happens around the loop."""

from .callback import HOOKS, Callback
from .early_stopping import EarlyStopping
from .lambda_callback import LambdaCallback
from .lr_monitor import LearningRateMonitor
from .model_checkpoint import ModelCheckpoint
from .model_summary import ModelSummary, summarize
from .progress_bar import TQDMProgressBar
from .timer import Timer

__all__ = [
    "HOOKS",
    "Callback",
    "EarlyStopping",
    "LambdaCallback",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "TQDMProgressBar",
    "Timer",
    "summarize",
]
