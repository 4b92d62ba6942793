"""Table of a model's modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .table import Summary, summarize

__getattr__, __dir__, __all__ = lazy_exports(__name__)
