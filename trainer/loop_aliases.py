"""Lightning's loop objects, as far as public code reads them: ``trainer.fit_loop.epoch_progress.current.completed``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .loop import Phase

if TYPE_CHECKING:
    from .trainer import Trainer


class FitLoopView:
    """What ``trainer.fit_loop`` is in Lightning, seen from outside. A limit that is set here holds for the Trainer.

    Args:
        trainer: whose loop it stands for.

    Raises:
        AttributeError: for anything else of Lightning's loop.
    """

    _LIMITS = ("max_epochs", "min_epochs", "max_steps", "min_steps")

    def __init__(self, trainer: Trainer) -> None:
        object.__setattr__(self, "_trainer", trainer)

    def __getattr__(self, name: str) -> Any:
        if name in self._LIMITS:
            return getattr(self._trainer, name)
        raise AttributeError(
            f"trainer.fit_loop has no {name!r}: it shows Lightning's limits and progress only. Use "
            "trainer.current_epoch, trainer.global_step, trainer.train_dataloader and callbacks instead."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._LIMITS:
            raise AttributeError(
                f"trainer.fit_loop.{name} can't be set: use a callback or a flag of the Trainer instead."
            )
        setattr(self._trainer, name, value)

    @property
    def epoch_progress(self) -> SimpleNamespace:
        """Epochs that were begun and completed."""
        trainer = self._trainer
        completed = trainer.progress.epoch
        epochs = _count(completed + (trainer.stage == "fit" and not trainer.sanity_checking), completed)
        return SimpleNamespace(current=epochs, total=epochs)

    @property
    def epoch_loop(self) -> SimpleNamespace:
        """Batches and optimizer steps, and whether there is a validation."""
        trainer, progress = self._trainer, self._trainer.progress
        in_step = progress.phase is Phase.IN_STEP
        batches = SimpleNamespace(
            current=_count(progress.batch + in_step, progress.batch),
            total=_count(progress.batches + in_step, progress.batches),
        )
        return SimpleNamespace(
            batch_idx=max(0, batches.current.ready - 1),
            batch_progress=batches,
            global_step=progress.step,
            total_batch_idx=batches.total.ready - 1,
            val_loop=SimpleNamespace(_data_source=SimpleNamespace(is_defined=lambda: trainer.has_validation)),
            _batches_that_stepped=progress.step,
        )


def _count(begun: int, completed: int) -> SimpleNamespace:
    return SimpleNamespace(ready=begun, started=begun, processed=completed, completed=completed)
