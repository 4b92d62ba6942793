"""What scripts import from ``lightning.pytorch.utilities.model_summary``: names, nothing else."""

from ..callbacks.model_table import Summary as ModelSummary
from ..callbacks.model_table import summarize

__all__ = ["ModelSummary", "summarize"]
