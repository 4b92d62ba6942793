"""Names that scripts import from ``lightning.pytorch.utilities.parsing``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ..compat.init_arguments import (
        get_init_args,
        lightning_getattr,
        lightning_hasattr,
        lightning_setattr,
        save_hyperparameters,
    )
    from ..trainer.core import AttributeDict

__getattr__, __dir__, __all__ = lazy_exports(__name__)
