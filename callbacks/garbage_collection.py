"""When Python looks for garbage: at the same step on all processes."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from ..common.validation import check_int
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class GarbageCollection(Callback):
    """Collects garbage every so many optimizer steps, and keeps Python from doing so in between.

    Python collects when a process has made so many objects, which is at another step on each; all others wait for the
    one that does. It acts after the task's own hooks (``after_task`` is 1), before anyone saves. What there is when
    training begins, libraries above all, is left out of each collection, which then takes milliseconds.

    A Trainer with several GPUs adds one that collects every 100 steps, unless it is given one.

    Args:
        every_n_steps: Optimizer steps between two collections.
        generation: How old the objects are that are looked at: 0 the youngest, 2 all.

    Raises:
        ValueError: For a value that can't be.
    """

    after_task = 1

    def __init__(self, every_n_steps: int = 1000, generation: int = 2) -> None:
        self.every_n_steps = check_int("every_n_steps", every_n_steps, 1)
        if check_int("generation", generation, 0) > 2:
            raise ValueError(f"generation={generation!r} must be 0, 1 or 2.")
        self.generation = generation
        self._was_on = self._has_frozen = False

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Collect all there is, and take over."""
        self._was_on = gc.isenabled()
        gc.collect()
        if not gc.get_freeze_count():  # else someone else's, who will undo it
            self._has_frozen = True
            gc.freeze()
        gc.disable()

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Collect if it is time."""
        if trainer.progress.step % self.every_n_steps == 0:
            gc.collect(self.generation)

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Leave it to Python again."""
        if self._has_frozen:
            self._has_frozen = False
            gc.unfreeze()
        if self._was_on:
            self._was_on = False
            gc.enable()
