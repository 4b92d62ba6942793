"""What scripts import from ``lightning.pytorch.callbacks.stochastic_weight_avg``: names, nothing else."""

from .swa import StochasticWeightAveraging

__all__ = ["StochasticWeightAveraging"]
