"""The names by which other people's code reads a Trainer. Ours reads what they stand for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    ProgressBar,
)
from ..engine import Accelerator, Metrics
from ..loggers import Logger
from ..strategies import Precision, Strategy
from .core import TaskModule
from .logging import Logbook
from .loop import Progress, Sources
from .settings import TrainerSettings


@dataclass(frozen=True)
class TrainerState:
    """What runs, in Lightning's words.

    Attributes:
        fn: what was called: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``; None if nothing runs.
        stage: what it does now: ``"train"``, ``"sanity_check"``, ``"validate"``, ``"test"`` or ``"predict"``.
    """

    fn: str | None
    stage: str | None


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
    num_sanity_val_steps: int
    max_seconds: float | None
    val_check_seconds: float | None
    flags_given: dict[str, Any]
    config: str | None = None  # the run's configuration, as YAML, where it has one; it goes into checkpoints
    resume_command: str | None = None  # the shell command that resumes the run, where one started it

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
    def num_nodes(self) -> int:
        """Machines."""
        return self.world_size // self.num_devices

    @property
    def node_rank(self) -> int:
        """This machine among all."""
        return self.accelerator.world.node_rank

    @property
    def num_devices(self) -> int:
        """Processes on this machine."""
        return self.accelerator.world.local_size

    @property
    def device_ids(self) -> list[int]:
        """The numbers of the devices in use on this machine, one for each process."""
        return list(range(self.num_devices))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """What a sampler of your own needs to know to share samples out; None on one process."""
        world = self.accelerator.data_world
        return {"num_replicas": world.size, "rank": world.rank} if world.size > 1 else None

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """float16's loss scaler, where one is in use."""
        return self.accelerator.scaler

    @property
    def precision_plugin(self) -> Precision:
        """The precision."""
        return self.accelerator.precision

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
    def state(self) -> TrainerState:
        """What runs, as a function and a stage of it."""
        if self.stage != "fit":
            return TrainerState(self.stage, self.stage)
        now = "sanity_check" if self.sanity_checking else "validate" if self._validates_within_fit else "train"
        return TrainerState("fit", now)

    @property
    def training(self) -> bool:
        """Whether a ``fit`` runs, and trains: not while it validates."""
        return self.stage == "fit" and not self._validates_within_fit

    @property
    def validating(self) -> bool:
        """Whether a validation runs, within ``fit`` too; not for the one before training, see ``sanity_checking``."""
        return self.stage == "validate" or (self._validates_within_fit and not self.sanity_checking)

    @property
    def _validates_within_fit(self) -> bool:
        return self.stage == "fit" and (self.sanity_checking or self.metrics.evaluation is not None)

    @property
    def testing(self) -> bool:
        """Whether a ``test`` runs."""
        return self.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether a ``predict`` runs."""
        return self.stage == "predict"

    @property
    def evaluating(self) -> bool:
        """Whether a validation or a ``test`` runs."""
        return self.validating or self.testing or self.sanity_checking

    @property
    def is_last_batch(self) -> bool:
        """Whether the micro-batch that is worked on, or was last, is its epoch's last one."""
        if self.sources is None or self.stage != "fit":
            return False
        loader = self.sources.train
        return loader.length is not None and loader.batches >= loader.length

    @property
    def num_training_batches(self) -> int | None:
        """Micro-batches of an epoch, of this process; None where that is not known, or nothing is trained."""
        sources = self.sources
        if sources is None or (self.stage != "fit" and not sources.has_train):
            return None
        return sources.train.length

    @property
    def num_val_batches(self) -> list[int | None]:
        """Batches of each validation loader, of this process; None where that is not known."""
        return self._lengths("val")

    @property
    def num_test_batches(self) -> list[int | None]:
        """The same, of each test loader."""
        return self._lengths("test")

    @property
    def num_predict_batches(self) -> list[int | None]:
        """The same, of each predict loader."""
        return self._lengths("predict")

    @property
    def num_sanity_val_batches(self) -> list[int | None]:
        """The same, in the few batches that are validated before training."""
        most = self.num_sanity_val_steps
        lengths = self._lengths("val")
        return lengths if most == -1 else [most if length is None else min(most, length) for length in lengths]

    def _lengths(self, kind: str) -> list[int | None]:
        return [] if self.sources is None else [loader.length for loader in self.sources.evaluation(kind)]

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
        evaluation = {} if self.metrics.evaluation is None else self.metrics.evaluation.local_values()
        return {**self.logbook.bar_values, **self.metrics.local_values(), **evaluation}

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str | None:
        """The run's folder: the first logger's, or the one that ``fit`` has made. No process has to ask another."""
        return next((logger.log_dir for logger in self.loggers if logger.log_dir), self.logbook.folder)

    @property
    def settings(self) -> dict[str, Any]:
        """The flags as they hold now, by name, where they are plain values."""
        found: dict[str, Any] = {"strategy": self.strategy.name, "device": str(self.accelerator.device)}
        found |= {"num_nodes": self.num_nodes, "devices": self.num_devices, "precision": self.precision}
        found["loggers"] = ", ".join(type(logger).__name__ for logger in self.loggers) or None
        found["callbacks"] = ", ".join(type(callback).__name__ for callback in self.callbacks) or None
        given = self.flags_given
        own = {one.name: getattr(self, one.name, given.get(one.name, found)) for one in fields(TrainerSettings)}
        found |= {name: value for name, value in own.items() if isinstance(value, int | float | str | None)}
        if self.val_check_seconds is not None:
            found["val_check_interval"] = f"{self.val_check_seconds:g} s"
        found["max_time"] = None if self.max_seconds is None else f"{self.max_seconds:g} s"
        found["deterministic"] = torch.are_deterministic_algorithms_enabled()
        found["benchmark"] = torch.backends.cudnn.benchmark
        return found

    @property
    def settings_given(self) -> set[str]:
        """The names in `settings` of the flags that were given another value than their default."""
        renamed = {"accelerator": "device", "logger": "loggers"}
        return {renamed.get(name, name) for name in self.flags_given}

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def lightning_module(self) -> TaskModule | None:
        """The task."""
        return self.task

    @property
    def model(self) -> Any:
        """The task as the strategy has wrapped it; the task itself before that."""
        return self.accelerator.models[0] if self.accelerator.models else self.task

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
        return self._loaders("val")

    @property
    def test_dataloaders(self) -> Any:
        """The user's test loader, or the list of them."""
        return self._loaders("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The user's predict loader, or the list of them."""
        return self._loaders("predict")

    def _loaders(self, kind: str) -> Any:
        sources = [] if self.sources is None else [loader.source for loader in self.sources.evaluation(kind)]
        return sources[0] if len(sources) == 1 else sources or None

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """The checkpoint callbacks."""
        return [callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)]

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first checkpoint callback, of those that save while all goes well."""
        return min(self.checkpoint_callbacks, key=lambda one: isinstance(one, OnExceptionCheckpoint), default=None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """The early-stopping callbacks."""
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first early-stopping callback."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The progress bar."""
        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)

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
        schedule = next((c for c in self.callbacks if isinstance(c, GradientAccumulationScheduler)), None)
        if schedule is not None:
            steps = schedule.steps(batches, self.max_epochs)
        else:
            steps = -(-batches // self.accelerator.gradient_accumulation_steps) * self.max_epochs
        return steps if self.max_steps == -1 else min(steps, self.max_steps)


def _tensors(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value, dtype=torch.get_default_dtype()) for name, value in values.items()}
