"""Names that scripts import from ``lightning.pytorch.utilities.exceptions``."""

from __future__ import annotations

from ..common.peer_names import find_peer_names

MisconfigurationException = ValueError
"""Alias for code that catches errors about invalid values under Lightning's name."""

__all__ = ["MisconfigurationException"]

__getattr__ = find_peer_names(__name__)
