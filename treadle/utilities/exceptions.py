"""What scripts import from ``lightning.pytorch.utilities.exceptions``: names, nothing else."""

from __future__ import annotations

from ..common.peer_names import find_peer_names

MisconfigurationException = ValueError
"""Every refusal of a value; code that catches it under this name goes on working."""

__all__ = ["MisconfigurationException"]

__getattr__ = find_peer_names(__name__)
