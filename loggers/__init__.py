"""Where the numbers of a run go. No service's package, nor TensorBoard or YAML, is imported before it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_exports import lazy_exports
from .logger import Logger, NullExperiment, rank_zero_experiment

if TYPE_CHECKING:
    from .csv import CSVLogger
    from .mlflow import MLFlowLogger
    from .tensorboard import TensorBoardLogger
    from .wandb import WandbLogger

_HOMES = {"CSVLogger": "csv", "MLFlowLogger": "mlflow", "TensorBoardLogger": "tensorboard", "WandbLogger": "wandb"}

__all__ = [
    "CSVLogger",
    "Logger",
    "MLFlowLogger",
    "NullExperiment",
    "TensorBoardLogger",
    "WandbLogger",
    "rank_zero_experiment",
]

__getattr__, __dir__ = lazy_exports(__name__, _HOMES, __all__)
