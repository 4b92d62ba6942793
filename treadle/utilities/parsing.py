"""Names that scripts import from ``lightning.pytorch.utilities.parsing``."""

from ..common.peer_names import find_peer_names
from ..compat.init_arguments import (
    get_init_args,
    lightning_getattr,
    lightning_hasattr,
    lightning_setattr,
    save_hyperparameters,
)
from . import AttributeDict

__all__ = [
    "AttributeDict",
    "get_init_args",
    "lightning_getattr",
    "lightning_hasattr",
    "lightning_setattr",
    "save_hyperparameters",
]

__getattr__ = find_peer_names(__name__)
