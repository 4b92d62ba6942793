"""The names by which other people's code reads a Trainer. Ours reads what they stand for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from ..callbacks import Callback, EarlyStopping, ModelCheckpoint, TQDMProgressBar
from ..engine import Accelerator, Metrics
from ..loggers import Logger
from ..strategies import Strategy
from .logbook import Logbook
from .progress import Progress
from .sources import Sources
from .task import TaskModule


class TrainerNames:
    """Lightning's read-only names, each one hop from what it means."""

    accelerator: Accelerator
    callbacks: list[Callback]
    loggers: list[Logger]
    logbook: Logbook
    metrics: Metrics
    progress: Progress
    sources: Sources | None
    task: TaskModule | None
    stage: str | None
    sanity_checking: bool
    max_epochs: int
    max_steps: int

    # -- processes -----------------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank zero."""
        return self.accelerator.is_main_process

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.accelerator.num_processes

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return self.accelerator.process_index

    @property
    def local_rank(self) -> int:
        """This process's rank on its machine."""
        return self.accelerator.local_process_index

    @property
    def strategy(self) -> Strategy:
        """How the model lies on the processes."""
        return self.accelerator.strategy

    @property
    def precision(self) -> str:
        """The precision's name."""
        return self.accelerator.precision.name

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches per optimizer step."""
        return self.accelerator.gradient_accumulation_steps

    # -- progress ------------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """The epoch being trained; once training is over, the epochs completed."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps that really happened."""
        return self.progress.step

    @property
    def training(self) -> bool:
        """Whether a ``fit`` runs."""
        return self.stage == "fit" and not self.sanity_checking

    @property
    def num_training_batches(self) -> int | None:
        """Micro-batches of an epoch, of this process; None where that is not known."""
        return None if self.sources is None else self.sources.train.length

    @property
    def num_val_batches(self) -> list[int | None]:
        """Batches of each validation loader, of this process; None where that is not known."""
        return [] if self.sources is None else [loader.length for loader in self.sources.evaluation("val")]

    # -- numbers -------------------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Everything logged: the newest epoch values of all processes, and this process's newest step values."""
        return _tensors({**self.logbook.callback_values, **self.metrics.latest()})

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """What the loggers got last, by name."""
        return _tensors(self.logbook.logged_values)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What the progress bar shows. Reads the device."""
        return {**self.logbook.bar_values, **self.metrics.local_values()}

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str | None:
        """The first logger's directory, if it has one. No process has to ask another."""
        return next((logger.log_dir for logger in self.loggers if logger.log_dir), None)

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def lightning_module(self) -> TaskModule | None:
        """The task."""
        return self.task

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The task's optimizers."""
        return [prepared.optimizer for prepared in self.accelerator.optimizers]

    @property
    def train_dataloader(self) -> Any:
        """The user's training loader."""
        return None if self.sources is None else self.sources.train.source

    @property
    def val_dataloaders(self) -> Any:
        """The user's validation loader, or the list of them."""
        sources = [] if self.sources is None else [loader.source for loader in self.sources.evaluation("val")]
        return sources[0] if len(sources) == 1 else sources or None

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """The checkpoint callbacks."""
        return [callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)]

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first checkpoint callback."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first early-stopping callback."""
        return next((callback for callback in self.callbacks if isinstance(callback, EarlyStopping)), None)

    @property
    def progress_bar_callback(self) -> TQDMProgressBar | None:
        """The progress bar."""
        return next((callback for callback in self.callbacks if isinstance(callback, TQDMProgressBar)), None)

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """The context to build a model in where and as it will be trained; see `Accelerator.init_module`.

        ``configure_model`` runs in it by itself.

        Args:
            empty_init: leave parameters without values, as a checkpoint will be loaded.
        """
        return self.accelerator.init_module(bool(empty_init))

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps the whole run will take; infinite where nothing limits it."""
        batches = self.num_training_batches
        if self.max_epochs == -1 or batches is None:
            return self.max_steps if self.max_steps != -1 else float("inf")
        steps = -(-batches // self.accelerator.gradient_accumulation_steps) * self.max_epochs
        return steps if self.max_steps == -1 else min(steps, self.max_steps)


def _tensors(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value, dtype=torch.get_default_dtype()) for name, value in values.items()}
