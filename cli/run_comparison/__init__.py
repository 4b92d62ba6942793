"""Comparison of runs: their metrics side by side, and the differences between their configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .comparison import Comparison, format_value
    from .comparison_page import render_page, write_page

__getattr__, __dir__, __all__ = lazy_exports(__name__)
