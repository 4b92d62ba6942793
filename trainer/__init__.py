"""The task, its data, and the Trainer that runs them. Each is imported when it is first used; commands do not wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .datamodule import DataModule
    from .progress import Progress
    from .settings import TrainerSettings
    from .task import TaskModule
    from .trainer import Trainer

_HOMES = {
    "DataModule": "datamodule",
    "Progress": "progress",
    "TaskModule": "task",
    "Trainer": "trainer",
    "TrainerSettings": "settings",
}

__all__ = ["DataModule", "Progress", "TaskModule", "Trainer", "TrainerSettings"]

__getattr__, __dir__ = lazy_exports(__name__, _HOMES, __all__)
