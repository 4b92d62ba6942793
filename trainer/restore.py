"""Which checkpoint to go on from, and how the Trainer's own parts go into one and out of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..callbacks import Callback
from ..engine import isolated_random_state, random_state
from ..strategies import warn

if TYPE_CHECKING:
    from .task import TaskModule
    from .trainer import Trainer


@dataclass(frozen=True)
class Bundle:
    """Something to save and load by two functions."""

    save: Callable[[], Any]
    load: Callable[[Any], None]

    def state_dict(self) -> Any:
        """What to save."""
        return self.save()

    def load_state_dict(self, state_dict: Any) -> None:
        """Take it back."""
        self.load(state_dict)


def resolve_checkpoint(trainer: Trainer, ckpt_path: str | Path | None) -> Path | None:
    """The checkpoint meant by a path, ``"last"`` or ``"best"``.

    Raises:
        ValueError: if there is none such.
    """
    if ckpt_path is None:
        return None
    if ckpt_path in ("last", "best"):
        callback = trainer.checkpoint_callback
        found = "" if callback is None else getattr(callback, f"{ckpt_path}_model_path")
        if not found:
            why = (
                "there is no ModelCheckpoint"
                if callback is None
                else f"its ModelCheckpoint has saved no {ckpt_path} one"
            )
            hint = " (save_last=True makes one)" if ckpt_path == "last" and callback is not None else ""
            raise ValueError(f"ckpt_path={ckpt_path!r}, but {why}{hint}. Give a path.")
        return Path(found)
    if not isinstance(ckpt_path, str | os.PathLike):
        raise TypeError(f"ckpt_path={ckpt_path!r} must be a checkpoint's directory, 'last' or 'best'.")
    path = Path(ckpt_path)
    if not path.is_dir():
        what = "is a file, and a checkpoint of ours is a directory" if path.exists() else "does not exist"
        raise ValueError(f"ckpt_path={str(ckpt_path)!r} {what}. Give a checkpoint's directory, 'last' or 'best'.")
    return path


def fitted(trainer: Trainer, stage: str, ckpt_path: Any) -> tuple[TaskModule, Any]:
    """The task of the last stage and, if a ``ModelCheckpoint`` has one, its best checkpoint: what no model means.

    Raises:
        ValueError: if there was no stage yet.
    """
    if trainer.task is None:
        raise ValueError(f"{stage} needs a model: pass one, or call fit first.")
    best = "" if trainer.checkpoint_callback is None else trainer.checkpoint_callback.best_model_path
    return trainer.task, ckpt_path or (best or None)


def save(trainer: Trainer, task: TaskModule, path: Path, weights_only: bool) -> None:
    """Save the run as it is between two optimizer steps."""
    progress = trainer.progress
    info = {
        "step": progress.step,
        "epoch": progress.epoch,
        "samples": progress.samples,
        "task": f"{type(task).__module__}.{type(task).__qualname__}",
    }
    if trainer.stage is None and not trainer.accelerator.registered and not weights_only:
        warn(
            f"{path}: the last stage was no fit, so there are weights to save but no optimizer, position or random "
            "state: no run can go on from this checkpoint. Save before, or say weights_only=True."
        )
        weights_only = True
    parts = {"hparams": dict(task.hparams)} if task.hparams else {}
    trainer.accelerator.save_state(path, info=info, parts=parts, weights_only=weights_only)


def register(trainer: Trainer) -> None:
    """Make the Trainer's own parts a part of every checkpoint."""
    world, metrics = trainer.accelerator.data_world, trainer.metrics
    own_states(trainer.callbacks)  # two of one name should be known now, not at the first save
    trainer.accelerator.register_for_checkpointing(
        progress=trainer.progress,
        logged=trainer.logbook,
        metrics=Bundle(
            # At an epoch's end a checkpoint begins the next one, which has logged nothing yet.
            lambda: {} if trainer.progress.closing else metrics.state_dict(world),
            lambda state: metrics.load_state_dict(state, world),
        ),
        callbacks=Bundle(lambda: callback_states(trainer), lambda state: load_callback_states(trainer, state)),
    )
    if trainer.datamodule is not None:
        trainer.accelerator.register_for_checkpointing(datamodule=trainer.datamodule)


def restore_run(trainer: Trainer, path: Path | None) -> Any:
    """Restore everything but the weights; returns the random state to go on with just before the first step."""
    if path is None:
        return None
    with isolated_random_state():
        trainer.accelerator.load_state(path, models=False)
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


def callback_states(trainer: Trainer) -> dict[str, Any]:
    """The callbacks' states by name, and what the ``on_save_checkpoint`` hooks add."""
    states = own_states(trainer.callbacks)
    reserved = {"epoch": trainer.current_epoch, "global_step": trainer.global_step}
    added: dict[str, Any] = dict(reserved)
    assert trainer.hooks is not None
    for hook in trainer.hooks.on_save_checkpoint:
        hook(added)
    return {"callbacks": states, "added": {name: value for name, value in added.items() if name not in reserved}}


def load_callback_states(trainer: Trainer, state: dict[str, Any]) -> None:
    """Give the callbacks their states back, and the ``on_load_checkpoint`` hooks what was added."""
    known = {callback.state_key: callback for callback in trainer.callbacks}
    for name, saved in state["callbacks"].items():
        if name in known:
            known[name].load_state_dict(saved)
        else:
            warn(f"the checkpoint has a state for {name}, but no such callback is there to take it.")
    assert trainer.hooks is not None
    checkpoint = {"epoch": trainer.current_epoch, "global_step": trainer.global_step, **state["added"]}
    for hook in trainer.hooks.on_load_checkpoint:
        hook(checkpoint)
