"""Names that scripts import from ``lightning.pytorch.utilities``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ..callbacks import get_available_flops, measure_flops
    from ..common.rank_zero import rank_zero_deprecation, rank_zero_info, rank_zero_only, rank_zero_warn
    from ..compat.inspection import (
        grad_norm,
        suggested_max_num_workers,
    )
    from ..engine import CombinedLoader, move_data_to_device
    from ..trainer.core import AttributeDict

__getattr__, __dir__, __all__ = lazy_exports(__name__)
