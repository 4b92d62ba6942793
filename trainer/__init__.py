"""The task, its data, and the Trainer that runs them."""

from .datamodule import DataModule
from .progress import Progress
from .task import TaskModule
from .trainer import Trainer

__all__ = ["DataModule", "Progress", "TaskModule", "Trainer"]
