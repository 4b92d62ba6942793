"""What scripts import from ``lightning.pytorch.utilities.parsing``: names, nothing else."""

from . import AttributeDict

__all__ = ["AttributeDict"]
