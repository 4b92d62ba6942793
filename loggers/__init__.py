"""Loggers for TensorBoard, CSV files, and tracking services such as MLflow and Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .clearml import ClearMLLogger
    from .comet import CometLogger
    from .csv_logs import CSVLogger
    from .directory import DirectoryLogger, claim_version
    from .logger import EVALUATED_AT, Logger, NullExperiment, rank_zero_experiment
    from .mlflow import MLFlowLogger
    from .swanlab import SwanLabLogger
    from .tensorboard import TensorBoardLogger
    from .trackio import TrackioLogger
    from .values import plain
    from .wandb import WandbLogger

__getattr__, __dir__, __all__ = lazy_exports(__name__)
