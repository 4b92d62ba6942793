"""Names that scripts import from ``lightning.pytorch.utilities.parsing``."""

from ..compat.init_arguments import (
    clean_namespace,
    collect_init_args,
    get_init_args,
    lightning_getattr,
    lightning_hasattr,
    lightning_setattr,
    parse_class_init_keys,
    save_hyperparameters,
)
from ..compat.inspection import is_picklable
from . import AttributeDict

__all__ = [
    "AttributeDict",
    "clean_namespace",
    "collect_init_args",
    "get_init_args",
    "is_picklable",
    "lightning_getattr",
    "lightning_hasattr",
    "lightning_setattr",
    "parse_class_init_keys",
    "save_hyperparameters",
]
