"""Integrations of other libraries with the Trainer. Each is imported only when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .optuna_pruning import PruningCallback, PyTorchLightningPruningCallback
    from .ray import RayTrainReportCallback, TuneReportCheckpointCallback
    from .transformers_task import TransformersTask

__getattr__, __dir__, __all__ = lazy_exports(__name__)
