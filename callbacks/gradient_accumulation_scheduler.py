"""`GradientAccumulationScheduler`: changes the number of micro-batches per optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..common.messages import announce
from ..common.validation import check_int
from .callback import Callback

if TYPE_CHECKING:
    from ..engine.data import Loader
    from ..trainer import TaskModule, Trainer


class GradientAccumulationScheduler(Callback):
    """Callback that changes ``accumulate_grad_batches`` at the start of specified epochs.

    Args:
        scheduling: Dict that maps the index of an epoch to the number of micro-batches per optimizer step from that
            epoch on. Before the first of these epochs, the number is 1.

    Raises:
        ValueError, TypeError: If ``scheduling`` is invalid.
        ValueError: In ``fit``, if the Trainer's ``accumulate_grad_batches`` is not 1, if another callback changes it,
            or if the task uses manual optimization.

    Examples:
        >>> from treadle.callbacks import GradientAccumulationScheduler
        >>> scheduler = GradientAccumulationScheduler({0: 1, 4: 8})
        >>> scheduler.get_accumulate_grad_batches(epoch=5)
        8
    """

    exchanges = True

    def __init__(self, scheduling: dict[int, int]) -> None:
        if not isinstance(scheduling, Mapping):
            raise TypeError(f"scheduling={scheduling!r} must be a dict: {{epoch: micro-batches per optimizer step}}.")
        if not scheduling:
            raise ValueError("scheduling={} must not be empty. Pass {epoch: micro-batches per optimizer step}.")
        for epoch, number in scheduling.items():
            check_int("scheduling: epoch", epoch, 0)
            check_int(f"scheduling[{epoch}]", number, 1)
        self.scheduling = {0: 1, **scheduling}
        self.epochs = sorted(self.scheduling)

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the number of micro-batches per optimizer step in an epoch.

        Args:
            epoch: Index of the epoch.
        """
        return self.scheduling[max(first for first in self.epochs if first <= epoch)]

    def estimate_steps(self, loader: Loader, epochs: int) -> int:
        """Return the number of optimizer steps in the first ``epochs`` epochs.

        Args:
            loader: The prepared training dataloader, whose length must be known.
            epochs: Number of epochs.
        """
        assert loader.length is not None
        return sum(-(-loader.length // self.get_accumulate_grad_batches(epoch)) for epoch in range(epochs))

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """In ``fit``, check that the task and the Trainer support the callback."""
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"{type(self).__name__} has no effect with automatic_optimization=False. Remove the "
                "callback, and decide in training_step when to call optimizer.step()."
            )
        flag, value = "step_micro_batches", trainer.accelerator.step_micro_batches
        if value is None and trainer.accumulate_grad_batches != 1:
            flag, value = "accumulate_grad_batches", trainer.accumulate_grad_batches
        if value is not None:
            raise ValueError(
                f"Trainer({flag}={value}) and {type(self).__name__} both set the number of micro-batches per optimizer "
                "step. Remove one of them."
            )
        others = [c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler) and c is not self]
        if others:
            raise ValueError(
                f"{type(self).__name__} and {type(others[0]).__name__} both set the number of micro-batches per "
                "optimizer step. Remove one of them."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Set the number of micro-batches per optimizer step for the first epoch of this run."""
        opened = trainer.opened_checkpoint
        epoch = 0 if opened is None else opened.manifest.epoch
        trainer.accelerator.gradient_accumulation_steps = self.get_accumulate_grad_batches(epoch)
        words = ", ".join(f"{self.scheduling[first]} from epoch {first}" for first in self.epochs)
        announce(f"micro-batches per optimizer step: {words}")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Set the number of micro-batches per optimizer step for the epoch."""
        trainer.accelerator.gradient_accumulation_steps = self.get_accumulate_grad_batches(trainer.progress.epoch)

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Reset the number of micro-batches per optimizer step to 1."""
        if stage == "fit":
            trainer.accelerator.gradient_accumulation_steps = 1
