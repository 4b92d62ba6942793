"""Names that scripts import from ``lightning.pytorch.utilities``."""

from ..callbacks import get_available_flops, measure_flops
from ..common.peer_names import find_peer_names
from ..common.rank_zero import rank_zero_deprecation, rank_zero_info, rank_zero_only, rank_zero_warn
from ..compat.inspection import (
    grad_norm,
    suggested_max_num_workers,
)
from ..engine import CombinedLoader, move_data_to_device
from ..trainer.core import AttributeDict

__all__ = [
    "AttributeDict",
    "CombinedLoader",
    "get_available_flops",
    "grad_norm",
    "measure_flops",
    "move_data_to_device",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "suggested_max_num_workers",
]

__getattr__ = find_peer_names(__name__)
