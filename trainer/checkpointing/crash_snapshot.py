"""The last completed optimizer step, kept so that it can be saved if the next one fails."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...common.remote_path import AnyPath
from ...engine import Loader
from ...engine.checkpoint import ADDED, STATE, CallbackStates, TrainState, encode_part
from ...engine.checkpoint import save as snapshot
from ...engine.metrics import metric_state, read_numbers
from ...strategies import World
from .before_validation import sum_parameters
from .trainer_state import collect_callback_states

if TYPE_CHECKING:
    from ...callbacks import Callback
    from ..core import TaskModule
    from ..loop import Hooks
    from ..trainer import Trainer


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
            on_step_end=(*hooks.on_step_end, self.note),
            on_train_epoch_start=(self.note, *hooks.on_train_epoch_start),
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
            self.note()
            self._sums = sum_parameters(self._task)  # to detect other weights, such as averages

    def note(self) -> None:
        """Record the state of the run after a complete step."""
        # Called on every process, because a user's object may call collectives in it.
        registered = self._collect_registered()
        if self._alone is None:
            return
        trainer, accelerator = self._trainer, self._trainer.accelerator
        self._state = {
            "progress": copy.copy(trainer.progress),
            "random": snapshot.collect_rank_random_state(accelerator),
            "buffers": [
                None if (b := buffers[name]) is None else b.detach().clone() for buffers, name in self._buffers
            ],
            "groups": [[_copy_options(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers],
            "shared": TrainState(
                schedulers=[copy.deepcopy(scheduler.state_dict()) for scheduler in accelerator.schedulers],
                scheduler_kinds=snapshot.list_scheduler_kinds(accelerator.schedulers),
                schedules_built=[built.effective_arguments for built in accelerator.schedules_built],
                # The loop steps schedulers itself, after real steps only.
                steps_since=[(0, 0) for _ in accelerator.schedulers],
                scheduler_advances=[1 for _ in accelerator.schedulers],
                scaler=None,  # read in `save`, because reading it synchronizes with the device
                loaders=[_copy_position(loader) for loader in accelerator.loaders if not loader.evaluation],
                evaluation_loaders=[_copy_position(loader) for loader in accelerator.loaders if loader.evaluation],
                stream=None if accelerator.stream is None else accelerator.stream.get_state(),
                reduction_orders=snapshot.list_reduction_orders(accelerator),
                counts_calls=accelerator.accumulation.counts_calls,
                registered=registered,
            ),
        }
        self._moving, self._changed, self._sums = False, False, None

    def _collect_registered(self) -> dict[str, Any]:
        trainer = self._trainer
        callback_states = copy.deepcopy(collect_callback_states(trainer.callbacks))
        states: dict[str, Any] = {"callbacks": CallbackStates(callbacks=callback_states, added={}), "metrics": {}}
        if self._alone is not None:
            over = trainer.progress.epoch_is_over
            states["metrics"] = trainer.metrics.state_dict(self._alone, self._counting, over=over, read=False)
        for name, value in trainer.accelerator.registered.items():
            if name not in states and name not in ("progress", "history"):
                states[name] = copy.deepcopy(value.state_dict())
        return states

    def amend(self, callback: Callback, **values: Any) -> None:
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
    def lost(self) -> str:
        """Reason why the step can no longer be saved; "" if it can."""
        trainer = self._trainer
        if trainer.preemption.abandoned:
            return "a second Ctrl-C came before the step was complete"
        if self._changed:
            return "the error occurred after a callback had changed the model or its optimizer and before the next step"
        if self._moving and trainer.progress.step_is_unfinished and trainer.world_size == 1:
            self.note()  # the step is taken; with several processes this could wait for the others
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
        trainer.checkpointer.refuse_broken_weights(task, path)
        parts = trainer.checkpointer.parts(task)
        hooked = trainer.checkpointer.call_save_hooks(task, state["progress"], weights_only)
        if weights_only and hooked.added:
            parts[ADDED] = hooked.added
        with trainer.checkpointer.applying(hooked, task):
            frozen = accelerator.checkpointer.find_frozen(self._alone) if trainable_only else ()
            files = snapshot.collect(accelerator, path, parts, weights_only=True, frozen=frozen)
        if not weights_only:
            files |= snapshot.encode_optimizers(accelerator)
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
            files |= snapshot.encode_rank_state(0, state["random"], [])
        # It lacks the other processes' state, so a resume treats it as that of one process.
        info = {**snapshot.run_metadata(accelerator), **trainer.checkpointer.info(state["progress"], task)}
        info |= {"world_size": 1, "saved_by": accelerator.num_processes}
        make_save = None
        if trainer.checkpointer.is_one_file(form, [str(path)]):
            make_save = trainer.checkpointer.choose_save(hooked, files, frozen[0] if frozen else ())
        snapshot.publish(self._alone, path, files, info, make_save=make_save)


def _copy_options(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }


def _copy_position(loader: Loader) -> dict[str, Any]:
    return _copy_state(loader.state_dict())


def _copy_state(state: dict[str, Any]) -> dict[str, Any]:
    if "loaders" in state:
        return {**state, "loaders": list(map(_copy_state, state["loaders"]))}
    return {**state, "source": copy.deepcopy(state["source"])}  # user code may change its state in place


def explain_need_of_others(trainer: Trainer) -> str:
    """Return the reason why rank zero alone cannot save the run; "" if it can."""
    strategy = trainer.accelerator.strategy
    if strategy.sharded:
        return f"with strategy={strategy.name!r} each process holds only a shard of the model"
    if any(strategy.keeps_apart(optimizer) for optimizer in trainer.optimizers):
        return "each process holds only a shard of the optimizer state"
    if getattr(strategy, "local_steps", None) is not None:
        return "between two synchronizations each process trains its own model"
    if trainer.accelerator.checkpointer.save_hooks:
        return "a hook registered with register_save_state_pre_hook may call collectives"
    return ""
