"""Names that scripts import from ``lightning.pytorch.utilities.exceptions``."""

from __future__ import annotations

from ..common.lazy_exports import lazy_exports

MisconfigurationException = ValueError
"""Alias for code that catches errors about invalid values under Lightning's name."""

__all__ = ["MisconfigurationException"]

__getattr__ = lazy_exports(__name__)[0]  # the names that the tables have
