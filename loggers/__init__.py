"""Where the numbers of a run go. Neither TensorBoard nor YAML is imported before it is used."""

from .csv import CSVLogger
from .logger import Logger, NullExperiment, rank_zero_experiment
from .tensorboard import TensorBoardLogger

__all__ = ["Logger", "CSVLogger", "TensorBoardLogger", "NullExperiment", "rank_zero_experiment"]
