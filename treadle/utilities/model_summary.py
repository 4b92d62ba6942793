"""Names that scripts import from ``lightning.pytorch.utilities.model_summary``."""

from ..common.peer_names import find_peer_names
from ..compat.layer_summary import (
    LayerSummary,
    ModelSummary,
    get_formatted_model_size,
    get_human_readable_count,
    parse_batch_shape,
    summarize,
)

__all__ = [
    "LayerSummary",
    "ModelSummary",
    "get_formatted_model_size",
    "get_human_readable_count",
    "parse_batch_shape",
    "summarize",
]

__getattr__ = find_peer_names(__name__)
