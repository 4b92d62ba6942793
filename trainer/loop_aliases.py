"""Views of the Trainer's loops, dataloaders and logged values in Lightning's form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from . import loop

if TYPE_CHECKING:
    from .trainer import Trainer

_LIMITS = ("max_epochs", "min_epochs", "max_steps", "min_steps")


class LoopView:
    """View of a loop in Lightning's form. Only the attributes in ``_flags``, which are the Trainer's, can be set."""

    _place: str
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


class EpochLoopView(LoopView):
    """View of the loop over the batches of an epoch in Lightning's form."""

    _place = "trainer.fit_loop.epoch_loop"
    _flags: tuple[str, ...] = ("max_steps", "min_steps")

    @property
    def batch_progress(self) -> SimpleNamespace:
        """Numbers of micro-batches begun and completed, in this epoch and in total."""
        progress, sources = self._trainer.progress, self._trainer.sources
        in_step = progress.phase is loop.Phase.IN_STEP
        # While the optimizer steps, the loop has already counted the batch, which Lightning counts after the step.
        train = None if sources is None else sources.prepared_train
        counted = in_step and train is not None and train.batches <= progress.batch
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

    def _should_accumulate(self) -> bool:
        trainer = self._trainer
        return bool(self.batch_progress.current.ready % trainer.accumulate_grad_batches) and not trainer.is_last_batch


class FitLoopView(EpochLoopView):
    """View of the training loop in Lightning's form, with the attributes of its epoch's loop."""

    _place = "trainer.fit_loop"
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

    def setup_data(self) -> None:
        """Create the training dataloader, unless it already exists or no stage has begun."""
        if (sources := self._trainer.sources) is not None:
            _ = sources.train

    @property
    def _data_source(self) -> SimpleNamespace:
        source: SimpleNamespace = view_data(self._trainer)._train_dataloader_source
        return source

    @property
    def _combined_loader(self) -> SimpleNamespace | None:
        trainer = self._trainer
        if trainer.train_dataloader is None or trainer.sources is None:
            return None
        source = trainer.sources.train.source
        return SimpleNamespace(iterables=trainer.train_dataloader, flattened=getattr(source, "flattened", [source]))


class EvaluationLoopView(LoopView):
    """View of an evaluation loop in Lightning's form."""

    _flags = ("inference_mode",)

    def __init__(self, trainer: Trainer, kind: str) -> None:
        super().__init__(trainer)
        object.__setattr__(self, "_kind", kind)
        object.__setattr__(self, "_place", f"trainer.{'validate' if kind == 'val' else kind}_loop")

    def setup_data(self) -> None:
        """Create the dataloaders, unless they already exist or no stage has begun."""
        if (sources := self._trainer.sources) is not None:
            sources.evaluation(self._kind)

    @property
    def max_batches(self) -> list[int | float]:
        """Number of batches of each dataloader on this process; infinite if unknown."""
        lengths: list[int | float] = getattr(self._trainer, f"num_{self._kind}_batches")
        return lengths

    @property
    def _data_source(self) -> SimpleNamespace:
        source: SimpleNamespace = getattr(view_data(self._trainer), f"_{self._kind}_dataloader_source")
        return source


def view_data(trainer: Trainer) -> SimpleNamespace:
    """Return a view of the sources of dataloaders in Lightning's form."""
    sources = {}
    for kind in loop.KINDS:
        loaders = partial(getattr, trainer, "train_dataloader" if kind == "train" else f"{kind}_dataloaders")
        is_defined = partial(getattr, trainer, "has_validation") if kind == "val" else partial(_is_given, loaders)
        sources[f"_{kind}_dataloader_source"] = SimpleNamespace(is_defined=is_defined, dataloader=loaders)
    selector = SimpleNamespace(model=trainer.task, datamodule=trainer.datamodule)
    return SimpleNamespace(trainer=trainer, _datahook_selector=selector, **sources)


def _is_given(get: Callable[[], Any]) -> bool:
    return get() is not None


class LoggerConnectorView(LoopView):
    """View of logged values in Lightning's form."""

    _place = "trainer._logger_connector"
    _flags = ("callback_metrics", "logged_metrics", "progress_bar_metrics")

    @property
    def should_update_logs(self) -> bool:
        """True if ``log_every_n_steps`` selects the current optimizer step, or if a stop is requested."""
        trainer = self._trainer
        every = trainer.log_every_n_steps
        return trainer.should_stop or bool(every and (trainer.progress.step + 1) % every == 0)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Send values to the loggers immediately. ``step`` defaults to the number of optimizer steps taken."""
        progress = self._trainer.progress
        row = {name: float(value) for name, value in metrics.items()}
        self._trainer.logbook.write_row(row, progress.step if step is None else step, progress.epoch)


def _count(begun: int, completed: int) -> SimpleNamespace:
    return SimpleNamespace(ready=begun, started=begun, processed=completed, completed=completed)
