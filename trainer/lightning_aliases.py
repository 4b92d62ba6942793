"""Lightning's names for what a Trainer has under a name of ours. Scripts read them; our own code never does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from ..callbacks import EarlyStopping
from ..strategies import Precision
from .core import TaskModule
from .logging import tensors_by_name
from .loop_aliases import DataConnectorView, EvaluationLoopView, FitLoopView, LoggerConnectorView
from .states import RunningStage, TrainerFn, TrainerState

if TYPE_CHECKING:
    from .trainer import Trainer


class LightningAliases:
    """Base class of `Trainer` that adds read-only names, each one hop from what it stands for.

    It has no state and no other subclass.
    """

    @property
    def _trainer(self) -> Trainer:
        return cast("Trainer", self)

    # -- processes -----------------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self._trainer.world_size // self.num_devices

    @property
    def node_rank(self) -> int:
        """Rank of this machine."""
        return self._trainer.accelerator.world.node_rank

    @property
    def num_devices(self) -> int:
        """Number of processes on this machine."""
        return self._trainer.accelerator.world.local_size

    @property
    def device_ids(self) -> list[int]:
        """Numbers of the devices in use on this machine, one for each process."""
        return list(range(self.num_devices))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """Arguments for a custom sampler that shares samples out; None on one process."""
        world = self._trainer.accelerator.data_world
        return {"num_replicas": world.size, "rank": world.rank} if world.size > 1 else None

    @property
    def precision_plugin(self) -> Precision:
        """The precision."""
        return self._trainer.accelerator.precision

    @property
    def _accelerator_connector(self) -> SimpleNamespace:
        """The devices, which libraries look up here before the run begins."""
        device = self._trainer.strategy.root_device
        devices = [
            torch.device(device.type, index) if device.index is not None else device for index in self.device_ids
        ]
        trainer = self._trainer
        return SimpleNamespace(
            _parallel_devices=devices,
            is_distributed=trainer.world_size > 1,
            strategy=trainer.strategy,
            use_distributed_sampler=trainer.use_distributed_sampler,
        )

    # -- the stage -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainerState:
        """The method that runs, or ran last, what it does at the moment, and how it ended."""
        trainer = self._trainer
        fn = None if trainer.latest_stage is None else TrainerFn(trainer.latest_stage)
        return TrainerState(trainer.status, fn, self._running_stage)

    @property
    def _running_stage(self) -> RunningStage | None:
        trainer = self._trainer
        if trainer.stage != "fit":
            return None if trainer.stage is None else RunningStage(trainer.stage)
        if trainer.sanity_checking:
            return RunningStage.SANITY_CHECKING
        return RunningStage.VALIDATING if self._validates_within_fit else RunningStage.TRAINING

    @property
    def training(self) -> bool:
        """True while a ``fit`` trains, and not while it validates."""
        return self._trainer.stage == "fit" and not self._validates_within_fit

    @property
    def validating(self) -> bool:
        """True while a validation runs, within ``fit`` too; not in the one before training, see ``sanity_checking``."""
        return self._trainer.stage == "validate" or (self._validates_within_fit and not self._trainer.sanity_checking)

    @property
    def _validates_within_fit(self) -> bool:
        trainer = self._trainer
        return trainer.stage == "fit" and (trainer.sanity_checking or trainer.metrics.evaluation is not None)

    @property
    def testing(self) -> bool:
        """True while a ``test`` runs."""
        return self._trainer.stage == "test"

    @property
    def predicting(self) -> bool:
        """True while a ``predict`` runs."""
        return self._trainer.stage == "predict"

    @property
    def evaluating(self) -> bool:
        """True while a validation or a ``test`` runs."""
        return self.validating or self.testing or self._trainer.sanity_checking

    @property
    def is_last_batch(self) -> bool:
        """True if the current micro-batch is the last of its epoch; between two, and after ``fit``, the latest one."""
        sources, progress = self._trainer.sources, self._trainer.progress
        if not progress.in_step and (progress.epoch_is_trained or not progress.batch):
            return progress.batches > 0  # the loader has begun to count the next epoch
        if sources is None or self._trainer.stage != "fit":
            return False
        return sources.train.length is not None and sources.train.batches >= sources.train.length

    @property
    def fit_loop(self) -> FitLoopView:
        """Lightning's limits and counters of the training loop."""
        return FitLoopView(self._trainer)

    @property
    def validate_loop(self) -> EvaluationLoopView:
        """Lightning's data and mode of `Trainer.validate`."""
        return EvaluationLoopView(self._trainer, "val")

    @property
    def test_loop(self) -> EvaluationLoopView:
        """Lightning's data and mode of `Trainer.test`."""
        return EvaluationLoopView(self._trainer, "test")

    @property
    def predict_loop(self) -> EvaluationLoopView:
        """Lightning's data and mode of `Trainer.predict`."""
        return EvaluationLoopView(self._trainer, "predict")

    @property
    def received_sigterm(self) -> bool:
        """False while hooks run: SIGTERM saves and ends the process by itself."""
        return False

    @property
    def enable_validation(self) -> bool:
        """True if ``fit`` validates; see `Trainer.has_validation`."""
        return self._trainer.has_validation

    # -- loaders -------------------------------------------------------------------------------------------------

    @property
    def num_val_batches(self) -> list[int | None]:
        """Batches of each validation loader, of this process; None where that is unknown."""
        return self._get_lengths("val")

    @property
    def num_test_batches(self) -> list[int | None]:
        """Batches of each test loader, of this process; None where that is unknown."""
        return self._get_lengths("test")

    @property
    def num_predict_batches(self) -> list[int | None]:
        """Batches of each predict loader, of this process; None where that is unknown."""
        return self._get_lengths("predict")

    @property
    def num_sanity_val_batches(self) -> list[int | None]:
        """Batches of each validation loader in the validation before training."""
        most = self._trainer.num_sanity_val_steps
        lengths = self._get_lengths("val")
        return lengths if most == -1 else [most if length is None else min(most, length) for length in lengths]

    def _get_lengths(self, kind: str) -> list[int | None]:
        sources = self._trainer.sources
        return [] if sources is None else [loader.length for loader in sources.evaluation(kind)]

    @property
    def train_dataloader(self) -> Any:
        """The user's training loader; None where the stage trains nothing."""
        sources = self._trainer.sources
        if sources is None or (self._trainer.stage != "fit" and not sources.has_train):
            return None
        return sources.train.source

    @property
    def val_dataloaders(self) -> Any:
        """The user's validation loader, or the list of them."""
        return self._get_loaders("val")

    @property
    def test_dataloaders(self) -> Any:
        """The user's test loader, or the list of them."""
        return self._get_loaders("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The user's predict loader, or the list of them."""
        return self._get_loaders("predict")

    def _get_loaders(self, kind: str) -> Any:
        sources = self._trainer.sources
        loaders = [] if sources is None else [loader.source for loader in sources.evaluation(kind)]
        return loaders[0] if len(loaders) == 1 else loaders or None

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """Latest values that the loggers got, by name."""
        return tensors_by_name(self._trainer.logbook.logged_values)

    @property
    def _logger_connector(self) -> LoggerConnectorView:
        """Has ``callback_metrics`` and its kin, which are the Trainer's own."""
        return LoggerConnectorView(self._trainer)

    @property
    def _data_connector(self) -> DataConnectorView:
        """The loaders, as libraries look them up in ``configure_optimizers``."""
        return DataConnectorView(self._trainer)

    @property
    def lightning_module(self) -> TaskModule | None:
        """The task."""
        return self._trainer.task

    @property
    def model(self) -> Any:
        """The task as the strategy has wrapped it; the task itself before that."""
        models = self._trainer.accelerator.models
        return models[0] if models else self._trainer.task

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first early-stopping callback; with ``fast_dev_run`` it is idle."""
        callbacks = [*self._trainer.callbacks, *self._trainer.idle_callbacks]
        return next((callback for callback in callbacks if isinstance(callback, EarlyStopping)), None)
