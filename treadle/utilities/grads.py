"""Names that scripts import from ``lightning.pytorch.utilities.grads``."""

from . import grad_norm

__all__ = ["grad_norm"]
