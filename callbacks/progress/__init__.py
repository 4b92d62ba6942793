"""What scripts import from ``lightning.pytorch.callbacks.progress``: names, nothing else."""

from ..progress_bar import ProgressBar
from ..rich_bar import RichProgressBar
from ..tqdm_bar import TQDMProgressBar

__all__ = ["ProgressBar", "RichProgressBar", "TQDMProgressBar"]
