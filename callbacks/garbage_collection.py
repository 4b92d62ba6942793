"""`GarbageCollection`: runs Python's garbage collection at the same step on all processes."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from ..common.validation import check_int
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class GarbageCollection(Callback):
    """Callback that runs Python's garbage collection every ``every_n_steps`` optimizer steps instead of automatically.

    With automatic collection, processes collect at different steps and wait for each other. Objects that exist when
    training begins are excluded from collection with ``gc.freeze``, unless other code has already frozen objects. A
    Trainer with several processes on CUDA GPUs adds a GarbageCollection that runs every 100 steps, unless ``callbacks``
    contains one or ``barebones=True`` is set.

    Args:
        every_n_steps: Number of optimizer steps between two collections. Default: 1000.
        generation: The oldest generation to collect: 0, 1, or 2 for all generations. Default: 2.

    Raises:
        ValueError: If an argument is invalid.

    Examples:
        >>> import treadle as tl
        >>> from treadle.callbacks import GarbageCollection
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> trainer = tl.Trainer(
        ...     max_steps=2,
        ...     accelerator="cpu",
        ...     devices=1,
        ...     barebones=True,
        ...     callbacks=GarbageCollection(every_n_steps=1, generation=0),
        ... )
        >>> trainer.fit(BoringModel())
    """

    after_task = 1

    def __init__(self, every_n_steps: int = 1000, generation: int = 2) -> None:
        self.every_n_steps = check_int("every_n_steps", every_n_steps, 1)
        if check_int("generation", generation, 0) > 2:
            raise ValueError(f"generation={generation!r} must be 0, 1 or 2.")
        self.generation = generation
        self._was_on = self._has_frozen = False

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Disable Python's automatic collection."""
        self._was_on = gc.isenabled()
        gc.collect()
        if not gc.get_freeze_count():  # otherwise other code has frozen objects, and will unfreeze them
            self._has_frozen = True
            gc.freeze()
        gc.disable()

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Collect garbage every ``every_n_steps`` steps."""
        if trainer.progress.step % self.every_n_steps == 0:
            gc.collect(self.generation)

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Restore Python's automatic collection."""
        if self._has_frozen:
            self._has_frozen = False
            gc.unfreeze()
        if self._was_on:
            self._was_on = False
            gc.enable()
