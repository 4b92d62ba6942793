"""How the Trainer's own parts go into a checkpoint and out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...callbacks import Callback
from ...common.messages import warn
from ...engine import isolated_random_state, random_state
from ...engine.checkpoint import (
    ADDED,
    CONFIG,
    DATAMODULE_HPARAMS,
    HPARAMS,
    CallbackStates,
    OpenCheckpoint,
    TrainerStates,
    in_memory,
    not_finite,
    open_registered,
)
from ..core import DataModule
from . import run_identity

if TYPE_CHECKING:
    from ..core import TaskModule
    from ..loop import Progress
    from ..trainer import Trainer


class Added(dict[str, Any]):
    """What is handed to the hooks that add to a checkpoint: not the checkpoint itself, as it is in Lightning."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(
            f"{key!r}: the hooks get what hooks have added, 'epoch' and 'global_step' only; weights and states are in "
            "files of their own. To leave some out, or rename them, override the task's state_dict and load_state_dict."
        )


@dataclass(frozen=True)
class Bundle:
    """Something to save and load by two functions; a third one says what shows how its tensors lie."""

    save: Callable[[], Any]
    load: Callable[[Any], None]
    like: Callable[[], Any] = dict

    def state_dict(self) -> Any:
        """What to save."""
        return self.save()

    def load_state_dict(self, state_dict: Any) -> None:
        """Take it back."""
        self.load(state_dict)

    def state_layout(self) -> Any:
        """What shows how the tensors of the state lie on the processes; no user's hook is called for it."""
        return self.like()


def fitted(trainer: Trainer, stage: str, ckpt_path: Any) -> tuple[TaskModule, Any]:
    """The task of the last stage and, if a ``ModelCheckpoint`` has one, its best checkpoint: what no model means.

    Raises:
        ValueError: if there was no stage yet.
    """
    if trainer.task is None:
        raise ValueError(f"{stage} needs a model: pass one, or call fit first.")
    best = "" if trainer.checkpoint_callback is None else trainer.checkpoint_callback.best_model_path
    return trainer.task, ckpt_path or (best or None)


def save(
    trainer: Trainer, task: TaskModule, paths: Sequence[str | Path], weights_only: bool, blocking: bool = True
) -> None:
    """Save the run as it is between two optimizer steps.

    Raises:
        ValueError: in the middle of a step, or if a weight is not finite on any process; nothing is written or removed
            then.
    """
    path, *also = map(Path, paths)
    if trainer.progress.in_step and not weights_only:
        raise ValueError(
            f"{path} can't be saved in the middle of optimizer step {trainer.progress.step + 1}: a run could not go on "
            "from there. Save in on_train_batch_end or on_step_end; weights_only=True saves the weights as they are."
        )
    trainer.accelerator.world.meet("trainer.save_checkpoint")
    with trainer.accelerator.world.together():
        refuse_broken_weights(trainer, task, path)
    if trainer.stage is None and not trainer.accelerator.registered and not weights_only:
        warn(
            f"{path}: the last stage was no fit, so there are weights to save but no optimizer, position or random "
            "state: no run can go on from this checkpoint. Save before, or say weights_only=True."
        )
        weights_only = True
    info, parts = facts(trainer.progress, task, trainer.datamodule), parts_of(task, trainer.datamodule, trainer.config)
    if weights_only and trainer.hooks is not None and (added := added_states(trainer)):
        parts[ADDED] = added  # else it is among the callbacks' states
    with trainer.history.spending("checkpoints"):
        trainer.accelerator.save_state(
            path, info=info, parts=parts, weights_only=weights_only, blocking=blocking, also=also
        )


def refuse_broken_weights(trainer: Trainer, task: TaskModule, path: Path) -> None:
    """Raise a ValueError if this process's part of the weights holds NaN or infinity: no run could go on from it."""
    if names := not_finite(task):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ValueError(
            f"{', '.join(names[:3])}{more} hold NaN or infinity after optimizer step {trainer.progress.step}, so "
            f"{path} is not saved; what was saved before stays. Go on from that with a lower learning rate or with "
            "gradient_clip_val."
        )


def facts(progress: Progress, task: TaskModule, datamodule: DataModule | None) -> dict[str, Any]:
    """What a checkpoint's manifest says of the run."""
    return {
        "step": progress.step,
        "epoch": progress.epoch,
        "samples": progress.samples,
        "task": run_identity.class_name(type(task)),
        "configuration": run_identity.configuration(task, datamodule),
    }


def parts_of(task: TaskModule, datamodule: DataModule | None, config: str | None = None) -> dict[str, Any]:
    """What a checkpoint holds beside the states of what was prepared or registered."""
    parts: dict[str, Any] = {}
    for name, owner in ((HPARAMS, task), (DATAMODULE_HPARAMS, datamodule)):
        if owner is not None and owner.hparams:
            kept = owner.stored_hparams()
            owner.check_hparams(kept)
            parts[name] = {
                "hyper_parameters": kept.values,
                "hparams_name": owner.hparams_name,
                "hparams_kind": owner.hparams_kind,
                "left_out": kept.left_out,
            }
    if config is not None:
        parts[CONFIG] = {"yaml": config}
    return parts


def register(trainer: Trainer) -> None:
    """Make the Trainer's own parts a part of every checkpoint."""
    world, metrics = trainer.accelerator.data_world, trainer.metrics
    own_states(trainer.callbacks)  # two of one name should be known now, not at the first save
    states = TrainerStates(
        progress=trainer.progress,
        logged=trainer.logbook,
        history=trainer.history,
        metrics=Bundle(
            # At an epoch's end a checkpoint begins the next one, which has logged nothing yet.
            lambda: metrics.state_dict(world, trainer.task, over=trainer.progress.epoch_is_over),
            lambda state: metrics.load_state_dict(state, world, trainer.task),
        ),
        callbacks=Bundle(
            lambda: callback_states(trainer),
            lambda state: load_callback_states(trainer, state),
            lambda: CallbackStates(callbacks=own_states(trainer.callbacks), added=added_layouts(trainer.callbacks)),
        ),
    )
    datamodule = trainer.datamodule
    if datamodule is not None and type(datamodule).state_dict is not DataModule.state_dict:
        # It has its state by the time the rest is restored, see `ahead`.
        states["datamodule"] = Bundle(datamodule.state_dict, lambda state: None)
    trainer.accelerator.register_for_checkpointing(**states)


@contextmanager
def ahead(trainer: Trainer, opened: OpenCheckpoint | None) -> Iterator[None]:
    """Inside, the counters and the data module are those of the checkpoint already, as loaders may follow from them."""
    before = trainer.progress.state_dict()
    try:
        if opened is not None:
            state = restore_datamodule(trainer, opened)
            trainer.progress.load_state_dict(state.get("progress", {}))
        yield
    except BaseException:
        if opened is not None:
            trainer.progress.load_state_dict(before)
        raise


def restore_datamodule(trainer: Trainer, opened: OpenCheckpoint) -> dict[str, Any]:
    """Give the data module its state back, if the checkpoint has one; returns all that was registered.

    All processes must ask.
    """
    datamodule = trainer.datamodule
    with trainer.accelerator.world.together():
        registered = open_registered(opened)
        if datamodule is not None and "datamodule" in registered:
            datamodule.load_state_dict(in_memory(registered["datamodule"], {}, {}))
    return registered


def restore_run(trainer: Trainer, opened: OpenCheckpoint | None, schedule: str | None = None) -> Any:
    """Restore everything but the weights; returns the random state to go on with just before the first step."""
    if opened is None:
        return None
    with isolated_random_state():
        info = trainer.accelerator.load_state(opened, models=False, schedule=schedule)
        if info.get("saved_by", 1) > 1:
            warn(
                f"{opened.path} was saved by rank zero alone when an error came: the other processes' random numbers "
                "and share of the epoch's logged means are not in it, and begin anew."
            )
        return random_state()


def own_states(callbacks: list[Callback]) -> dict[str, Any]:
    """The callbacks' states by name.

    Raises:
        ValueError: if two callbacks would be saved under one name.
    """
    states: dict[str, Any] = {}
    for callback in callbacks:
        if state := callback.state_dict():
            if callback.state_key in states:
                raise ValueError(
                    f"two callbacks would be saved under the name {callback.state_key!r}: give one another state_key."
                )
            states[callback.state_key] = state
    return states


def callback_states(trainer: Trainer) -> CallbackStates:
    """The callbacks' states by name, and what the ``on_save_checkpoint`` hooks add."""
    return CallbackStates(callbacks=own_states(trainer.callbacks), added=added_states(trainer))


def added_states(trainer: Trainer) -> dict[str, Any]:
    """What the ``on_save_checkpoint`` hooks add."""
    reserved = {"epoch": trainer.current_epoch, "global_step": trainer.global_step}
    added = Added(reserved)
    assert trainer.hooks is not None
    for hook in trainer.hooks.on_save_checkpoint:
        hook(added)
    return {name: value for name, value in added.items() if name not in reserved}


def added_layouts(callbacks: list[Callback]) -> dict[str, Any]:
    """How the tensors lie that callbacks add; no hook is called for it, as that may change something."""
    return {name: value for callback in callbacks for name, value in callback.added_layout().items()}


def load_callback_states(trainer: Trainer, state: CallbackStates) -> None:
    """Give the callbacks their states back, and the ``on_load_checkpoint`` hooks what was added."""
    known = {callback.state_key: callback for callback in trainer.callbacks}
    for name, saved in state["callbacks"].items():
        if name in known:
            known[name].load_state_dict(saved)
        else:
            warn(f"the checkpoint has a state for {name}, but no such callback is there to take it.")
    assert trainer.hooks is not None
    added = Added({"epoch": trainer.current_epoch, "global_step": trainer.global_step, **state["added"]})
    for hook in trainer.hooks.on_load_checkpoint:
        hook(added)
