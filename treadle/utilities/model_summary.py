"""Names that scripts import from ``lightning.pytorch.utilities.model_summary``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ..compat.layer_summary import (
        LayerSummary,
        ModelSummary,
        get_formatted_model_size,
        get_human_readable_count,
        parse_batch_shape,
        summarize,
    )

__getattr__, __dir__, __all__ = lazy_exports(__name__)
