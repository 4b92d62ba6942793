"""Callbacks for Trainers in Ray workers. They report to Ray and resume from its checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .train import RayTrainReportCallback
    from .tune import TuneReportCheckpointCallback

__getattr__, __dir__, __all__ = lazy_exports(__name__)
