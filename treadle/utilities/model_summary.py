"""What scripts import from ``lightning.pytorch.utilities.model_summary``: names, nothing else."""

from ..callbacks import Summary as ModelSummary
from ..callbacks import summarize

__all__ = ["ModelSummary", "summarize"]
