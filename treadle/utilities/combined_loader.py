"""What scripts import from ``lightning.pytorch.utilities.combined_loader``: names, nothing else."""

from . import CombinedLoader

__all__ = ["CombinedLoader"]
