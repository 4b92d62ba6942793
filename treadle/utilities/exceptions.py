"""What scripts import from ``lightning.pytorch.utilities.exceptions``: names, nothing else."""

from __future__ import annotations

MisconfigurationException = ValueError
"""Every refusal of a value; code that catches it under this name goes on working."""

__all__ = ["MisconfigurationException"]
