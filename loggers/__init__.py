"""Where the numbers of a run go. No service's package, nor TensorBoard or YAML, is imported before it is used."""

from .csv import CSVLogger
from .logger import Logger, NullExperiment, rank_zero_experiment
from .mlflow import MLFlowLogger
from .tensorboard import TensorBoardLogger
from .wandb import WandbLogger

__all__ = [
    "Logger",
    "CSVLogger",
    "MLFlowLogger",
    "TensorBoardLogger",
    "WandbLogger",
    "NullExperiment",
    "rank_zero_experiment",
]
