"""What scripts import from ``lightning.pytorch.callbacks.progress.rich_progress``: names, nothing else."""

from ..rich_bar import RichProgressBar, RichProgressBarTheme

__all__ = ["RichProgressBar", "RichProgressBarTheme"]
