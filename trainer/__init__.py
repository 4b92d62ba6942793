"""The task, its data, and the Trainer that runs them. Each is imported when it is first used; commands do not wait."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value  # found without a detour from now on
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
