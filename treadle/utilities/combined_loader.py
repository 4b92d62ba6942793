"""Names that scripts import from ``lightning.pytorch.utilities.combined_loader``."""

from . import CombinedLoader

__all__ = ["CombinedLoader"]
