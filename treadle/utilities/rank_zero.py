"""Names that scripts import from ``lightning.pytorch.utilities.rank_zero``."""

from lightning_utilities.core.rank_zero import WarningCache, rank_prefixed_message, rank_zero_debug

from . import rank_zero_deprecation, rank_zero_info, rank_zero_only, rank_zero_warn


class LightningDeprecationWarning(DeprecationWarning):
    """Category of warnings about deprecated names. Its filters do not affect the warnings of other libraries."""


__all__ = [
    "LightningDeprecationWarning",
    "WarningCache",
    "rank_prefixed_message",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]
