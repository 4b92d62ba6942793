"""How many micro-batches an optimizer step takes, epoch by epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..common.messages import announce
from ..common.validation import check_int
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class GradientAccumulationScheduler(Callback):
    """Changes ``accumulate_grad_batches`` at the beginning of epochs.

    ``trainer.estimated_stepping_batches`` counts with it, and a run that goes on has the number of its epoch. It acts
    before the task's own hooks (``after_task`` is 0).

    Args:
        scheduling: The number by the epoch, counted from 0, from which on it holds; 1 before the first one.

    Raises:
        ValueError: For epochs or numbers that can't be, or none; before the first step, if the Trainer has a number of
            its own, or the task steps its optimizers itself.
        TypeError: For anything but a dict.
    """

    exchanges = True

    def __init__(self, scheduling: dict[int, int]) -> None:
        if not isinstance(scheduling, Mapping):
            raise TypeError(f"scheduling={scheduling!r} must be a dict: {{epoch: micro-batches per optimizer step}}.")
        if not scheduling:
            raise ValueError("scheduling={} says nothing: give {epoch: micro-batches per optimizer step}.")
        for epoch, number in scheduling.items():
            check_int("an epoch of scheduling", epoch, 0)
            check_int(f"scheduling[{epoch}]", number, 1)
        self.scheduling = {0: 1, **scheduling}
        self.epochs = sorted(self.scheduling)

    def going_to_accumulate_grad_batches(self) -> bool:
        """Whether any step takes several micro-batches."""
        return any(number > 1 for number in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Micro-batches per optimizer step in an epoch."""
        return self.scheduling[max(first for first in self.epochs if first <= epoch)]

    def steps(self, batches: int, epochs: int) -> int:
        """Optimizer steps of so many epochs of so many micro-batches."""
        return sum(-(-batches // self.get_accumulate_grad_batches(epoch)) for epoch in range(epochs))

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """See that nobody else decides."""
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                "GradientAccumulationScheduler has no effect with automatic_optimization=False: step every so many "
                "batches in training_step."
            )
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) and GradientAccumulationScheduler "
                "both say how many batches a step takes: leave out one of them."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Begin with the number of the first epoch, or of the one that a checkpoint was saved in."""
        opened = trainer.opened_checkpoint
        epoch = 0 if opened is None else opened.manifest.epoch
        trainer.accelerator.gradient_accumulation_steps = self.get_accumulate_grad_batches(epoch)
        words = ", ".join(f"{self.scheduling[first]} from epoch {first}" for first in self.epochs)
        announce(f"micro-batches per optimizer step: {words}")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Take the epoch's number."""
        number = self.get_accumulate_grad_batches(trainer.progress.epoch)
        trainer.accelerator.gradient_accumulation_steps = number

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Leave the Trainer as it was."""
        if stage == "fit":
            trainer.accelerator.gradient_accumulation_steps = 1
