"""Where the numbers of a run go. No service's package, nor TensorBoard or YAML, is imported before it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value  # found without a detour from now on
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
