"""Views of the Trainer's loops, dataloaders and logged values in Lightning's form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .loop import Phase

if TYPE_CHECKING:
    from .trainer import Trainer

_LIMITS = ("max_epochs", "min_epochs", "max_steps", "min_steps")


class LoopView:
    """View of a loop in Lightning's form. Only the attributes in ``_flags``, which are the Trainer's, can be set."""

    _place = "trainer.fit_loop"
    _flags: tuple[str, ...] = ()

    def __init__(self, trainer: Trainer) -> None:
        object.__setattr__(self, "_trainer", trainer)

    def __getattr__(self, name: str) -> Any:
        if name in self._flags:
            return getattr(self._trainer, name)
        raise AttributeError(
            f"{self._place} has no attribute {name!r}, because it has only some attributes of Lightning's loop. Use "
            "trainer.current_epoch, trainer.global_step, trainer.train_dataloader or a callback instead."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._flags:
            raise AttributeError(f"{self._place}.{name} cannot be set. Use a callback or a Trainer flag instead.")
        setattr(self._trainer, name, value)


class FitLoopView(LoopView):
    """View of the training loop in Lightning's form."""

    _flags = _LIMITS

    @property
    def epoch_progress(self) -> SimpleNamespace:
        """Numbers of epochs begun and completed."""
        trainer = self._trainer
        completed = trainer.progress.epoch
        epochs = _count(completed + (trainer.stage == "fit" and not trainer.sanity_checking), completed)
        return SimpleNamespace(current=epochs, total=epochs)

    @property
    def epoch_loop(self) -> EpochLoopView:
        """View of the batches and optimizer steps of the epoch."""
        return EpochLoopView(self._trainer)

    @property
    def batch_idx(self) -> int:
        """Index of the current or latest micro-batch in the epoch; 0 before the first."""
        return self.epoch_loop.batch_idx

    @property
    def total_batch_idx(self) -> int:
        """Index of the current or latest micro-batch in the run; -1 before the first."""
        return self.epoch_loop.total_batch_idx

    def setup_data(self) -> None:
        """Create the training dataloader, unless it already exists or no stage has begun."""
        sources = self._trainer.sources
        if sources is not None:
            _ = sources.train

    @property
    def _data_source(self) -> SimpleNamespace:
        return DataConnectorView(self._trainer)._train_dataloader_source

    @property
    def _combined_loader(self) -> SimpleNamespace | None:
        trainer = self._trainer
        if trainer.train_dataloader is None or trainer.sources is None:
            return None
        source = trainer.sources.train.source
        return SimpleNamespace(iterables=trainer.train_dataloader, flattened=getattr(source, "flattened", [source]))

    def _should_accumulate(self) -> bool:
        return self.epoch_loop._should_accumulate()


class EpochLoopView(LoopView):
    """View of the loop over the batches of an epoch in Lightning's form."""

    _place = "trainer.fit_loop.epoch_loop"
    _flags = ("max_steps", "min_steps")

    @property
    def batch_progress(self) -> SimpleNamespace:
        """Numbers of micro-batches begun and completed, in this epoch and in total."""
        progress, sources = self._trainer.progress, self._trainer.sources
        in_step = progress.phase is Phase.IN_STEP
        # While the optimizer steps, the loop has already counted the batch, which Lightning counts after the step.
        counted = in_step and sources is not None and sources.has_train and sources.train.batches <= progress.batch
        begun, over = in_step and not counted, -1 if counted else 0
        total = _count(progress.batches + progress.refused + begun, progress.batches + over)
        if progress.epoch_is_over or not (progress.batch or begun):  # Lightning resets these before the next batch
            current = _count(progress.last_batch + progress.last_refused, progress.last_batch)
        else:
            current = _count(progress.batch + begun, progress.batch + over)
        return SimpleNamespace(
            current=current,
            total=total,
            is_last_batch=self._trainer.is_last_batch,
        )

    @property
    def batch_idx(self) -> int:
        """Index of the current or latest micro-batch in the epoch; 0 before the first."""
        return int(max(0, self.batch_progress.current.ready - 1))

    @property
    def total_batch_idx(self) -> int:
        """Index of the current or latest micro-batch in the run; -1 before the first."""
        return int(self.batch_progress.total.ready - 1)

    @property
    def global_step(self) -> int:
        """Alias of `Trainer.global_step`."""
        return self._trainer.progress.step

    @property
    def val_loop(self) -> EvaluationLoopView:
        """View of the validation within ``fit``."""
        return EvaluationLoopView(self._trainer, "val")

    @property
    def _batches_that_stepped(self) -> int:
        return self._trainer.progress.step

    def _accumulated_batches_reached(self) -> bool:
        return bool(self.batch_progress.current.ready % self._trainer.accumulate_grad_batches == 0)

    def _num_ready_batches_reached(self) -> bool:
        return self._trainer.is_last_batch

    def _should_accumulate(self) -> bool:
        return not (self._accumulated_batches_reached() or self._num_ready_batches_reached())


class EvaluationLoopView(LoopView):
    """View of an evaluation loop in Lightning's form."""

    _flags = ("inference_mode",)

    def __init__(self, trainer: Trainer, kind: str) -> None:
        super().__init__(trainer)
        object.__setattr__(self, "_kind", kind)
        object.__setattr__(self, "_place", f"trainer.{'validate' if kind == 'val' else kind}_loop")

    def setup_data(self) -> None:
        """Create the dataloaders, unless they already exist or no stage has begun."""
        sources = self._trainer.sources
        if sources is not None:
            sources.evaluation(self._kind)

    @property
    def max_batches(self) -> list[int | float]:
        """Number of batches of each dataloader on this process; infinite if unknown."""
        lengths: list[int | float] = getattr(self._trainer, f"num_{self._kind}_batches")
        return lengths

    @property
    def _data_source(self) -> SimpleNamespace:
        source: SimpleNamespace = getattr(DataConnectorView(self._trainer), f"_{self._kind}_dataloader_source")
        return source


class DataConnectorView:
    """View of the sources of dataloaders in Lightning's form."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @property
    def _train_dataloader_source(self) -> SimpleNamespace:
        trainer = self.trainer
        return SimpleNamespace(
            is_defined=lambda: trainer.train_dataloader is not None, dataloader=lambda: trainer.train_dataloader
        )

    @property
    def _val_dataloader_source(self) -> SimpleNamespace:
        trainer = self.trainer
        return SimpleNamespace(is_defined=lambda: trainer.has_validation, dataloader=lambda: trainer.val_dataloaders)

    @property
    def _test_dataloader_source(self) -> SimpleNamespace:
        trainer = self.trainer
        return SimpleNamespace(
            is_defined=lambda: trainer.test_dataloaders is not None, dataloader=lambda: trainer.test_dataloaders
        )

    @property
    def _predict_dataloader_source(self) -> SimpleNamespace:
        trainer = self.trainer
        return SimpleNamespace(
            is_defined=lambda: trainer.predict_dataloaders is not None, dataloader=lambda: trainer.predict_dataloaders
        )

    @property
    def _datahook_selector(self) -> SimpleNamespace:
        return SimpleNamespace(model=self.trainer.task, datamodule=self.trainer.datamodule)


class LoggerConnectorView:
    """View of logged values in Lightning's form."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @property
    def should_update_logs(self) -> bool:
        """True if ``log_every_n_steps`` selects the current optimizer step, or if a stop is requested."""
        trainer = self.trainer
        every = trainer.log_every_n_steps
        return trainer.should_stop or bool(every and (trainer.progress.step + 1) % every == 0)

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """Alias of `Trainer.callback_metrics`."""
        return self.trainer.callback_metrics

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """Alias of `Trainer.logged_metrics`."""
        return self.trainer.logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Alias of `Trainer.progress_bar_metrics`."""
        return self.trainer.progress_bar_metrics

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Send values to the loggers immediately. ``step`` defaults to the number of optimizer steps taken."""
        progress = self.trainer.progress
        row = {name: float(value) for name, value in metrics.items()}
        self.trainer.logbook.write_row(row, progress.step if step is None else step, progress.epoch)


def _count(begun: int, completed: int) -> SimpleNamespace:
    return SimpleNamespace(ready=begun, started=begun, processed=completed, completed=completed)
