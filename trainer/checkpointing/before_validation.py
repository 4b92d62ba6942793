"""State of the run before a validation, saved if a signal ends the run during the validation."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ...callbacks import Callback
from ...engine import random_state, set_random_state
from ...engine.metrics import metric_state
from ...strategies.distributed import local
from ..core import has_own
from .trainer_state import collect_callback_states

if TYPE_CHECKING:
    from ..core import TaskModule
    from ..trainer import Trainer

_COUNTING = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
)


class BeforeValidation:
    """Copy of the state that a validation changes, such as RNG state, buffers and metric objects."""

    def __init__(self, trainer: Trainer, task: TaskModule) -> None:
        self._trainer, self._task = trainer, task
        stream = trainer.accelerator.stream
        self._random = random_state()
        self._drawn = None if stream is None else stream.get_state()
        self._positions = [
            (loader, loader.state_dict(), loader.reading_state())
            for loader in trainer.accelerator.loaders
            if loader.evaluation
        ]
        self._buffers = self._started_buffers = _copy_buffers(task)
        self._callbacks = copy.deepcopy(collect_callback_states([c for c in trainer.callbacks if _may_count(c)]))
        self._counts = ExitStack()
        self._counts.enter_context(metric_state.preserve_counts(metric_state.find(task).values()))
        self._sums = sum_parameters(task)

    def note_start(self) -> None:
        """Copy the buffers after the hooks at the validation's start; a hook may have replaced them with averages."""
        self._started_buffers = _copy_buffers(self._task)

    def discard(self) -> None:
        """Discard the copy after the validation."""
        self._counts.pop_all()

    def try_to_leave(self) -> bool:
        """Let callbacks restore the model's own weights, and return whether they did. Must be called on all ranks."""
        trainer, task = self._trainer, self._task
        moved_buffers = _copy_buffers(task)
        _restore_buffers(self._started_buffers)
        for callback in trainer.callbacks:
            callback.leave_validation(trainer, task)
        changed = not all(before.equal(now) for before, now in zip(self._sums, sum_parameters(task), strict=True))
        if not trainer.accelerator.world.any(changed):
            return True
        for callback in trainer.callbacks:
            callback.return_to_validation(trainer, task)
        _restore_buffers(moved_buffers)
        return False

    def restore(self) -> None:
        """Restore the copied state, except callback states, whose copies are saved in the next checkpoint."""
        trainer = self._trainer
        for entry in () if trainer.metrics.evaluation is None else trainer.metrics.evaluation.entries:
            if entry.metric is not None:
                entry.metric.reset()
        trainer.metrics.evaluation = None
        self._counts.close()
        _restore_buffers(self._buffers)
        for loader, position, reading in self._positions:
            loader.load_state_dict(position)
            loader.load_reading_state(reading)
        if self._drawn is not None:
            assert trainer.accelerator.stream is not None
            trainer.accelerator.stream.go_to(self._drawn)
        set_random_state(self._random)
        trainer.checkpointer.earlier_callback_states = self._callbacks


def _copy_buffers(task: nn.Module) -> list[tuple[Tensor, Tensor]]:
    return [(buffer, buffer.clone()) for buffer in task.buffers()]


def _restore_buffers(copies: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, before in copies:
        buffer.copy_(before)


def sum_parameters(task: nn.Module) -> list[Tensor]:
    """Return the sum of this process's shard of each parameter, to detect changes. The sums stay on the device."""
    parameters = (local(parameter.detach()) for parameter in task.parameters())
    return [(p.float() if p.element_size() == 1 else p).sum() for p in parameters]  # 8-bit formats cannot be summed


def _may_count(callback: Callback) -> bool:
    """Return whether a callback may have a state that a validation changes; Treadle's callbacks have none."""
    is_ours = type(callback).__module__.startswith("treadle.")
    return not is_ours and any(has_own(callback, name, Callback) for name in _COUNTING)
