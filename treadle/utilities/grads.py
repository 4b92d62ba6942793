"""What scripts import from ``lightning.pytorch.utilities.grads``: names, nothing else."""

from . import grad_norm

__all__ = ["grad_norm"]
