"""Lightning's names for attributes of the Trainer."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from .. import callbacks, engine, strategies
from ..engine import data
from ..strategies import distributed
from . import logging
from .loop_aliases import EvaluationLoopView, FitLoopView, LoggerConnectorView, view_data
from .states import RunningStage, TrainerFn, TrainerState

if TYPE_CHECKING:
    from .checkpointing import TrainerCheckpointer
    from .core import TaskModule
    from .trainer import Trainer


class LightningAliases:
    """Base class of `Trainer` with read-only aliases of its attributes and methods."""

    @property
    def _trainer(self) -> Trainer:
        """This object, typed as a Trainer."""
        return cast("Trainer", self)

    def _search_again(self, finder: callbacks.LearningRateFinder | callbacks.BatchSizeFinder) -> None:
        from .tuning import search_again  # imported here, because it takes 10 ms

        search_again(self._trainer, finder)

    # -- processes -----------------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self._trainer.world_size // self.num_devices

    @property
    def node_rank(self) -> int:
        """Rank of this machine among the machines of the run."""
        return self._trainer.accelerator.world.node_rank

    @property
    def num_devices(self) -> int:
        """Number of processes on this machine."""
        return self._trainer.accelerator.world.local_size

    @property
    def device_ids(self) -> list[int]:
        """Indices of the GPUs of this machine's processes; local ranks if there are none or they are unknown."""
        world, device = self._trainer.accelerator.world, self._trainer.strategy.root_device
        local_ranks = list(range(world.local_size))
        if device.index is None:
            return local_ranks
        if world.local_size == 1:
            return [device.index]
        requested = self._trainer.changed_flags.get("devices", "auto")
        chosen = distributed.parse_devices(device.type, requested) or local_ranks
        # A launcher may have assigned other GPUs than the flag's.
        return chosen if chosen[world.local_rank] == device.index else local_ranks

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """Arguments ``num_replicas`` and ``rank`` for a custom sampler that shards samples; None for a single shard."""
        world = self._trainer.accelerator.data_world
        return {"num_replicas": world.size, "rank": world.rank} if world.size > 1 else None

    @property
    def precision_plugin(self) -> strategies.Precision:
        """Precision of the run, with the ``device`` and the ``scaler`` that Lightning's plugins have."""
        accelerator = self._trainer.accelerator
        precision = copy.copy(accelerator.precision)
        for name, value in (("device", accelerator.device.type), ("scaler", accelerator.scaler)):
            object.__setattr__(precision, name, value)  # the class is frozen
        return precision

    @property
    def _checkpoint_connector(self) -> TrainerCheckpointer:
        """Object with the method ``dump_checkpoint``."""
        return self._trainer.checkpointer

    @property
    def _accelerator_connector(self) -> SimpleNamespace:
        trainer, device = self._trainer, self._trainer.strategy.root_device
        devices = [device if device.index is None else torch.device(device.type, index) for index in self.device_ids]
        return SimpleNamespace(
            _parallel_devices=devices,
            cluster_environment=trainer._plugged.environment,
            is_distributed=trainer.world_size > 1,
            strategy=trainer.strategy,
            use_distributed_sampler=trainer.use_distributed_sampler,
        )

    # -- the stage -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainerState:
        """State of the current or last stage."""
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
        return RunningStage.TRAINING if trainer.metrics.evaluation is None else RunningStage.VALIDATING

    @property
    def training(self) -> bool:
        """True if ``fit`` is running, but neither a validation nor the sanity check within it."""
        return self._running_stage is RunningStage.TRAINING

    @property
    def validating(self) -> bool:
        """True if a validation is running, including one within ``fit``, but not the sanity check."""
        return self._running_stage is RunningStage.VALIDATING

    @property
    def testing(self) -> bool:
        """True if ``test`` is running."""
        return self._trainer.stage == "test"

    @property
    def predicting(self) -> bool:
        """True if ``predict`` is running."""
        return self._trainer.stage == "predict"

    @property
    def evaluating(self) -> bool:
        """True if a validation, the sanity check or ``test`` is running."""
        return self._running_stage is not None and self._running_stage.evaluating

    @property
    def is_last_batch(self) -> bool:
        """True if the current or latest training micro-batch is known to be the last of its epoch."""
        sources, progress = self._trainer.sources, self._trainer.progress
        if not progress.in_step and (progress.epoch_is_trained or not progress.batch):
            return progress.batches > 0  # the dataloader already counts the next epoch
        if sources is None or self._trainer.stage != "fit":
            return False
        return sources.train.length is not None and sources.train.batches >= sources.train.length

    @property
    def fit_loop(self) -> FitLoopView:
        """Training loop, in Lightning's form."""
        return FitLoopView(self._trainer)

    @property
    def validate_loop(self) -> EvaluationLoopView:
        """Loop of `Trainer.validate`, in Lightning's form."""
        return EvaluationLoopView(self._trainer, "val")

    @property
    def test_loop(self) -> EvaluationLoopView:
        """Loop of `Trainer.test`, in Lightning's form."""
        return EvaluationLoopView(self._trainer, "test")

    @property
    def predict_loop(self) -> EvaluationLoopView:
        """Loop of `Trainer.predict`, in Lightning's form."""
        return EvaluationLoopView(self._trainer, "predict")

    @property
    def enable_validation(self) -> bool:
        """Alias of `Trainer.has_validation`."""
        return self._trainer.has_validation

    # -- loaders -------------------------------------------------------------------------------------------------

    @property
    def num_val_batches(self) -> list[int | float]:
        """Number of batches of each validation dataloader on this process; infinite if unknown.

        Empty in a `fit` that never validates.
        """
        trainer = self._trainer
        return [] if trainer.latest_stage == "fit" and not trainer.has_validation else self._get_lengths("val")

    @property
    def num_test_batches(self) -> list[int | float]:
        """Number of batches of each test dataloader on this process; infinite if unknown."""
        return self._get_lengths("test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Number of batches of each predict dataloader on this process; infinite if unknown."""
        return self._get_lengths("predict")

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Number of batches of each validation dataloader in the sanity check of `fit`; infinite if unknown."""
        lengths = self.num_val_batches if self._trainer.latest_stage == "fit" else []
        return [min(self._trainer.num_sanity_val_steps, length) for length in lengths]

    def _get_lengths(self, kind: str) -> list[int | float]:
        if (sources := self._trainer.sources) is None:
            return []
        lengths = []
        for loader in sources.evaluation(kind):
            limit = float("inf") if loader.limit is None else loader.limit
            for part in loader.loaders if isinstance(loader, engine.JointLoader) else [loader]:
                lengths.append(min(limit, float("inf") if part.length is None else part.length))
        return lengths

    @property
    def train_dataloader(self) -> Any:
        """The user's training dataloader, or the dict or list of several; None if there is none."""
        sources = self._trainer.sources
        if sources is None or (self._trainer.latest_stage != "fit" and sources.prepared_train is None):
            return None
        source = sources.train.source
        return source.iterables if isinstance(source, data.CombinedLoader) else source

    @property
    def val_dataloaders(self) -> Any:
        """The user's validation dataloader, or the dict or list of several; None if there are none."""
        return self._get_loaders("val")

    @property
    def test_dataloaders(self) -> Any:
        """The user's test dataloader, or the dict or list of several; None if there are none."""
        return self._get_loaders("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The user's predict dataloader, or the dict or list of several; None if there are none."""
        return self._get_loaders("predict")

    def _get_loaders(self, kind: str) -> Any:
        sources = self._trainer.sources
        source = None if sources is None else sources.get_evaluation_source(kind)
        return source.iterables if isinstance(source, data.CombinedLoader) else source

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """Latest values for the loggers, by name."""
        return logging.tensors_by_name(self._trainer.logbook.logged_values, self._trainer.logbook.wide)

    @property
    def _logger_connector(self) -> LoggerConnectorView:
        return LoggerConnectorView(self._trainer)

    @property
    def _data_connector(self) -> SimpleNamespace:
        """View of the dataloaders, which libraries look up in ``configure_optimizers``."""
        return view_data(self._trainer)

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context manager in which new parameters get the run's device and dtype.

        See `Accelerator.init_module`. ``configure_model`` already runs in this context.

        Args:
            empty_init: Skip common initializers of ``torch.nn.init``, such as ``normal_`` and ``kaiming_uniform_``. Use
                this if a checkpoint will be loaded into the model. Default: False.
        """
        return self._trainer.accelerator.init_module(bool(empty_init))

    @property
    def lightning_module(self) -> TaskModule | None:
        """Task of the run, or of a later ``trainer.strategy.connect(task)``; None before both."""
        return self._trainer.checkpointer.find_task()

    @property
    def model(self) -> Any:
        """Task as wrapped by the strategy, or the task itself before it is wrapped; None before the first stage."""
        models = self._trainer.accelerator.models
        return models[0] if models else self._trainer.task

    @property
    def checkpoint_callback(self) -> callbacks.ModelCheckpoint | None:
        """First `ModelCheckpoint`, or None.

        An `OnExceptionCheckpoint` is returned only if there is no other `ModelCheckpoint`.
        """
        savers = [saver for saver in self._trainer.callbacks if isinstance(saver, callbacks.ModelCheckpoint)]
        return min(savers, key=lambda saver: isinstance(saver, callbacks.OnExceptionCheckpoint), default=None)

    @property
    def early_stopping_callback(self) -> callbacks.EarlyStopping | None:
        """First early-stopping callback, or None. It is inactive with ``fast_dev_run``."""
        stoppers = (stopper for stopper in self._trainer.callbacks if isinstance(stopper, callbacks.EarlyStopping))
        return next(stoppers, None)
