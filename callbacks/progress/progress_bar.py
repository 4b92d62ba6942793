"""What scripts import from ``lightning.pytorch.callbacks.progress.progress_bar``: names, nothing else."""

from ..progress_bar import ProgressBar

__all__ = ["ProgressBar"]
