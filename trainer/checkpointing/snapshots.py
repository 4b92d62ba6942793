"""Copies of a run's state: of the last completed optimizer step, and of the moment before a validation.

The first is saved if the next step fails, the second is restored if a signal ends the run during the validation.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...callbacks import Callback
from ...common.remote_path import AnyPath
from ...engine import random_state, set_random_state
from ...engine.checkpoint import STATE, CallbackStates, content, encode_part, refuse_not_finite, store
from ...engine.metrics import metric_state, read_numbers
from ...strategies import World
from ...strategies.distributed import local
from ..copies import copy_state
from ..core import has_own
from .trainer_state import collect_callback_states

if TYPE_CHECKING:
    from ..core import TaskModule
    from ..loop import Hooks
    from ..trainer import Trainer

_COUNTING = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
)


class LastStep:
    """Copy of the state that changes between two optimizer steps, from which the last step can be saved.

    Parameters and the optimizer's tensors do not change between two steps, so they are not copied. After an error, rank
    zero saves the checkpoint alone and without collectives, because other ranks may have exited.

    Args:
        trainer: The running Trainer.
        task: The user's task.
    """

    def __init__(self, trainer: Trainer, task: TaskModule) -> None:
        accelerator = trainer.accelerator
        self._trainer = trainer
        self._task = task
        self._alone = World() if accelerator.is_main_process else None
        self._moving = self._changed = False
        self._sums: list[Tensor] | None = None
        self._state: dict[str, Any] = {}
        # Searched once, because finding metric objects visits all modules.
        self._counting = task if metric_state.find(task) else None
        self._buffers = [
            (module._buffers, name)
            for module in task.modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        self._handles = [optimizer.register_step_pre_hook(self._mark_moving) for optimizer in trainer.optimizers]

    def attach(self, hooks: Hooks) -> None:
        """Add the hooks that record the run at the end of each step, and before an epoch or a validation begins.

        Args:
            hooks: Dispatch table of the run.
        """
        vars(hooks).update(
            on_step_end=(*hooks.on_step_end, self.record),
            on_train_epoch_start=(self.record, *hooks.on_train_epoch_start),
            on_validation_start=(self._note_validation_start, *hooks.on_validation_start),
        )

    def close(self) -> None:
        """Remove the hooks from the optimizers, which a user may keep for another run."""
        for handle in self._handles:
            handle.remove()

    def _mark_moving(self, *_: Any) -> None:
        self._moving = True

    def changed(self) -> None:
        """Record that a callback changed the model or the optimizer after the last step."""
        self._changed = True

    def _note_validation_start(self) -> None:
        """Record the last step before its validation, because a run that resumes from it repeats the validation."""
        if not self._trainer.sanity_checking:
            self.record()
            self._sums = sum_parameters(self._task)  # to detect other weights, such as averages

    def record(self) -> None:
        """Record the state of the run after a complete step."""
        # Called on every process, because a user's object may call collectives in it.
        registered = self._collect_registered()
        if self._alone is None:
            return
        trainer, accelerator = self._trainer, self._trainer.accelerator
        self._state = {
            "progress": copy.copy(trainer.progress),
            "random": content.collect_rank_random_state(accelerator.loaders),
            "buffers": [
                None if (b := buffers[name]) is None else b.detach().clone() for buffers, name in self._buffers
            ],
            "groups": [[_copy_options(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers],
            "shared": content.collect_train_state(accelerator, registered, copied=True),
        }
        self._moving, self._changed, self._sums = False, False, None

    def _collect_registered(self) -> dict[str, Any]:
        trainer = self._trainer
        callback_states = copy_state(collect_callback_states(trainer.callbacks))
        states: dict[str, Any] = {"callbacks": CallbackStates(callbacks=callback_states, added={}), "metrics": {}}
        if self._alone is not None:
            over = trainer.progress.epoch_is_over
            states["metrics"] = trainer.metrics.state_dict(self._alone, self._counting, over=over, read=False)
        for name, value in trainer.accelerator.registered.items():
            if name not in states and name not in ("progress", "history"):
                states[name] = copy_state(value.state_dict())
        return states

    def update_callback_state(self, callback: Callback, **values: Any) -> None:
        """Update a callback's state in the recorded step, for example the path of a checkpoint that it has saved.

        Args:
            callback: Callback whose state changed.
            values: The changed entries by name.
        """
        if self._state:
            self._state["shared"]["registered"]["callbacks"]["callbacks"][callback.state_key] |= values

    @property
    def step(self) -> int:
        """Number of optimizer steps taken when the state was recorded; 0 if none is recorded."""
        return self._state["progress"].step if self._state else 0

    @property
    def counts(self) -> dict[str, int]:
        """Values of ``epoch`` and ``step`` in the recorded state, for checkpoint names."""
        return {"epoch": self._state["progress"].epoch, "step": self.step}

    @property
    def unsavable_reason(self) -> str:
        """Reason why the step can no longer be saved; "" if it can."""
        trainer = self._trainer
        if trainer.preemption.abandoned:
            return "a second Ctrl-C came before the step was complete"
        if self._changed:
            return "the error occurred after a callback had changed the model or its optimizer and before the next step"
        if self._moving and trainer.progress.step_is_unfinished and trainer.world_size == 1:
            self.record()  # the step is taken; with several processes this could wait for the others
        if self._moving:
            return "the error occurred after the next optimizer step had begun and before it was complete"
        if self._sums is not None and not all(map(torch.equal, self._sums, sum_parameters(self._task))):
            return "the error occurred during a validation, while the model held other weights, such as averaged ones"
        return ""

    def save(self, path: AnyPath, weights_only: bool, trainable_only: bool, form: str | None = None) -> None:
        """Write a checkpoint of the recorded step, on rank zero without collectives.

        Args:
            path: Path of the checkpoint.
            weights_only: Omit everything that is needed only to resume.
            trainable_only: Omit frozen weights.
            form: See `TrainerCheckpointer.save`. Default: None.

        Raises:
            ValueError: If the checkpoint must not be saved, for example because a weight is not finite.
            TypeError: If a state is not plain data.
            OSError: If the checkpoint cannot be written.
        """
        trainer, task, state = self._trainer, self._task, self._state
        accelerator = trainer.accelerator
        assert self._alone is not None
        for (buffers, name), saved_buffer in zip(self._buffers, state["buffers"], strict=True):
            buffer = buffers.get(name)
            if saved_buffer is None or buffer is None or buffer.shape != saved_buffer.shape:
                buffers[name] = saved_buffer
            else:
                buffer.copy_(saved_buffer)
        for optimizer, groups in zip(trainer.optimizers, state["groups"], strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)
        refuse_not_finite([task], (), trainer.progress.step, path)
        hooked = trainer.checkpointer.call_save_hooks(task, state["progress"], weights_only)
        with trainer.checkpointer.applying(hooked, task, weights_only) as parts:
            frozen = accelerator.checkpointer.find_frozen(self._alone) if trainable_only else ()
            files = content.collect(accelerator, path, parts, weights_only=True, frozen=frozen)
        if not weights_only:
            files |= content.encode_optimizers(accelerator)
            shared = state["shared"]
            metrics = shared["registered"]["metrics"]
            shared["registered"]["metrics"] = {
                **read_numbers({**metrics, "objects": {}}),
                "objects": metrics["objects"],
            }
            shared["registered"]["progress"] = state["progress"].state_dict()
            shared["registered"]["history"] = trainer.history.state_dict()  # large, so not copied in each step
            shared["scaler"] = None if accelerator.scaler is None else accelerator.scaler.state_dict()
            shared["registered"]["callbacks"]["added"] = hooked.added
            files |= encode_part(STATE, shared)
            files |= content.encode_rank_state(0, state["random"], [])
        # It lacks the other processes' state, so a resume treats it as that of one process.
        info = {**content.run_metadata(accelerator), **trainer.checkpointer.info(state["progress"])}
        info |= {"world_size": 1, "saved_by": accelerator.num_processes}
        make_save = None
        if trainer.checkpointer.is_one_file(form, [str(path)]):
            make_save = trainer.checkpointer.choose_save(hooked, files, frozen[0] if frozen else ())
        store.write_and_commit(self._alone, path, files, info, make_save=make_save)


def _copy_options(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }


def explain_need_of_all_ranks(trainer: Trainer) -> str:
    """Return the reason why rank zero alone cannot save the run; "" if it can."""
    strategy = trainer.accelerator.strategy
    if strategy.sharded:
        return f"with strategy={strategy.name!r} each process holds only a shard of the model"
    if any(strategy.keeps_apart(optimizer) for optimizer in trainer.optimizers):
        return "each process holds only a shard of the optimizer state"
    if trainer.accelerator.save_hooks:
        return "a hook registered with register_save_state_pre_hook may call collectives"
    return ""


class ValidationSnapshot:
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
        self._callbacks = copy_state(collect_callback_states([c for c in trainer.callbacks if _may_count(c)]))
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
        changed = not all(saved.equal(now) for saved, now in zip(self._sums, sum_parameters(task), strict=True))
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
    for buffer, saved in copies:
        buffer.copy_(saved)


def sum_parameters(task: nn.Module) -> list[Tensor]:
    """Return the sum of this process's shard of each parameter, to detect changes. The sums stay on the device."""
    parameters = (local(parameter.detach()) for parameter in task.parameters())
    return [(p.float() if p.element_size() == 1 else p).sum() for p in parameters]  # 8-bit formats cannot be summed


def _may_count(callback: Callback) -> bool:
    """Return whether a callback may have a state that a validation changes; Treadle's callbacks have none."""
    is_ours = type(callback).__module__.startswith("treadle.")
    return not is_ours and any(has_own(callback, name, Callback) for name in _COUNTING)
