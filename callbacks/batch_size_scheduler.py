"""`BatchSizeScheduler`: changes the number of samples per optimizer step during the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.messages import announce
from .gradient_accumulation_scheduler import GradientAccumulationScheduler

if TYPE_CHECKING:
    from ..engine.data import Loader
    from ..trainer import TaskModule, Trainer


class BatchSizeScheduler(GradientAccumulationScheduler):
    """Callback that changes the effective batch size, the samples per optimizer step, at specified steps.

    The size of the micro-batches stays the same, and more of them are accumulated. The same schedule therefore gives
    the same steps on any number of processes. Steps that were skipped because a gradient was not finite count.

    Args:
        scheduling: Dict that maps an optimizer step to the number of samples per step, over all processes, from that
            step on. It must contain step 0. Each number of samples must be a multiple of the dataloader's batch size
            times the number of processes.

    Raises:
        ValueError, TypeError: If ``scheduling`` is invalid.
        ValueError: In ``fit``, if a number of samples is not such a multiple, if the dataloader has no fixed batch
            size, if the Trainer's ``accumulate_grad_batches`` is not 1, or if the task uses manual optimization.

    Examples:
        >>> from treadle.callbacks import BatchSizeScheduler
        >>> scheduler = BatchSizeScheduler({0: 64, 1000: 128, 4000: 512})
        >>> scheduler.get_batch_size(step=2000)
        128
    """

    _full = 1
    _first_step = 0

    def __init__(self, scheduling: dict[int, int]) -> None:
        super().__init__(scheduling)
        if 0 not in scheduling:
            raise ValueError(f"scheduling={scheduling!r} must contain step 0. Add the batch size of the first step.")

    def get_batch_size(self, step: int) -> int:
        """Return the number of samples of an optimizer step.

        Args:
            step: Index of the optimizer step.
        """
        return super().get_accumulate_grad_batches(step)

    def get_accumulate_grad_batches(self, step: int) -> int:
        """Return the number of micro-batches of an optimizer step in the current run.

        Args:
            step: Index of the optimizer step.
        """
        return self.get_batch_size(step) // self._full

    def estimate_steps(self, loader: Loader, epochs: int) -> int:
        """Return the number of optimizer steps in the first ``epochs`` epochs.

        Args:
            loader: The prepared training dataloader, whose length must be known.
            epochs: Number of epochs.
        """
        assert loader.length is not None
        step = 0
        for _ in range(epochs):
            remaining = loader.length
            while remaining > 0:
                width = max(1, self.get_batch_size(step) // loader.total_batch_size)
                steps = min([-(-remaining // width), *(first - step for first in self.epochs if first > step)])
                step, remaining = step + steps, remaining - steps * width
        return step

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Plan the number of micro-batches of each optimizer step."""
        loader, progress = trainer.sources.train, trainer.progress
        if getattr(loader.source, "batch_size", None) is None:
            raise ValueError(
                "BatchSizeScheduler needs a dataloader with a fixed batch size, but this one has none. Set the "
                "DataLoader's batch_size, or use GradientAccumulationScheduler."
            )
        self._full = loader.total_batch_size
        for step, samples in self.scheduling.items():
            if samples % self._full:
                raise ValueError(
                    f"scheduling[{step}]={samples} must be a multiple of {self._full}, the samples of a micro-batch "
                    f"on all {trainer.world_size} processes. Change it, or the dataloader's batch_size."
                )

        def plan_group(number: int) -> int:
            if number == 0:  # the loader starts, so all steps so far are complete
                self._first_step = progress.step + progress.skipped
            return self.get_accumulate_grad_batches(self._first_step + number)

        trainer.accelerator.accumulation.plan_group = plan_group
        self._set_number(trainer)
        words = ", ".join(f"{self.scheduling[first]} from step {first}" for first in self.epochs)
        announce(f"samples per optimizer step: {words}")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Set the Trainer's ``accumulate_grad_batches`` to that of the next step."""
        self._set_number(trainer)

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Set the Trainer's ``accumulate_grad_batches`` to that of the next step."""
        self._set_number(trainer)

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Reset the number of micro-batches per optimizer step to 1."""
        super().teardown(trainer, pl_module, stage)
        if stage == "fit":
            trainer.accelerator.accumulation.plan_group = None

    def _set_number(self, trainer: Trainer) -> None:
        number = self.get_accumulate_grad_batches(trainer.progress.step + trainer.progress.skipped)
        if number != trainer.accelerator.gradient_accumulation_steps:
            trainer.accelerator.gradient_accumulation_steps = number
