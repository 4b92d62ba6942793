"""What scripts import from ``lightning.pytorch.callbacks.progress.tqdm_progress``: names, nothing else."""

from ..tqdm_bar import TQDMProgressBar

__all__ = ["TQDMProgressBar"]
