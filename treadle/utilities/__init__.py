"""Names that scripts import from ``lightning.pytorch.utilities``."""

from ..callbacks import get_available_flops, measure_flops
from ..common.peer_names import find_peer_names
from ..common.rank_zero import rank_zero_deprecation, rank_zero_info, rank_zero_only, rank_zero_warn
from ..compat.inspection import (
    find_shared_parameters,
    grad_norm,
    is_picklable,
    is_shared_filesystem,
    set_shared_parameters,
    suggested_max_num_workers,
)
from ..engine import CombinedLoader, move_data_to_device
from ..trainer.core import AttributeDict

__all__ = [
    "AttributeDict",
    "CombinedLoader",
    "find_shared_parameters",
    "get_available_flops",
    "grad_norm",
    "is_picklable",
    "is_shared_filesystem",
    "measure_flops",
    "move_data_to_device",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "set_shared_parameters",
    "suggested_max_num_workers",
]

__getattr__ = find_peer_names(__name__)
