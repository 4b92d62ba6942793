"""Checks before the first step: likely oversights, settings that differ by rank, and state that cannot be saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .fit_checks import check_monitors, warn_of_untrained
    from .rank_consistency import check_optimizers_match, collect_settings
    from .storable import check_storable

__getattr__, __dir__, __all__ = lazy_exports(__name__)
