"""How the Trainer's own parts go into a checkpoint and out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..callbacks import Callback
from ..engine import isolated_random_state, random_state
from ..engine.finite import not_finite
from ..strategies import warn

if TYPE_CHECKING:
    from .progress import Progress
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
        ValueError: if a weight is not finite on any process; nothing is written or removed then.
    """
    path, *also = map(Path, paths)
    with trainer.accelerator.world.together():
        refuse_broken_weights(trainer, task, path)
    if trainer.stage is None and not trainer.accelerator.registered and not weights_only:
        warn(
            f"{path}: the last stage was no fit, so there are weights to save but no optimizer, position or random "
            "state: no run can go on from this checkpoint. Save before, or say weights_only=True."
        )
        weights_only = True
    info = facts(trainer.progress, task)
    trainer.accelerator.save_state(
        path, info=info, parts=parts_of(task), weights_only=weights_only, blocking=blocking, also=also
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


def facts(progress: Progress, task: TaskModule) -> dict[str, Any]:
    """What a checkpoint's manifest says of the run."""
    return {
        "step": progress.step,
        "epoch": progress.epoch,
        "samples": progress.samples,
        "task": f"{type(task).__module__}.{type(task).__qualname__}",
    }


def parts_of(task: TaskModule) -> dict[str, Any]:
    """What a checkpoint holds beside the states of what was prepared or registered."""
    return {"hparams": dict(task.hparams)} if task.hparams else {}


def register(trainer: Trainer) -> None:
    """Make the Trainer's own parts a part of every checkpoint."""
    world, metrics = trainer.accelerator.data_world, trainer.metrics
    own_states(trainer.callbacks)  # two of one name should be known now, not at the first save
    trainer.accelerator.register_for_checkpointing(
        progress=trainer.progress,
        logged=trainer.logbook,
        metrics=Bundle(
            # At an epoch's end a checkpoint begins the next one, which has logged nothing yet.
            lambda: metrics.state_dict(world, trainer.task, over=trainer.progress.closing),
            lambda state: metrics.load_state_dict(state, world, trainer.task),
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
        info = trainer.accelerator.load_state(path, models=False)
        if info.get("saved_by", 1) > 1:
            warn(
                f"{path} was saved by rank zero alone when an error came: the other processes' random numbers and "
                "share of the epoch's logged means are not in it, and begin anew."
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


def callback_states(trainer: Trainer) -> dict[str, Any]:
    """The callbacks' states by name, and what the ``on_save_checkpoint`` hooks add."""
    return {"callbacks": own_states(trainer.callbacks), "added": added_states(trainer)}


def added_states(trainer: Trainer) -> dict[str, Any]:
    """What the ``on_save_checkpoint`` hooks add."""
    reserved = {"epoch": trainer.current_epoch, "global_step": trainer.global_step}
    added: dict[str, Any] = dict(reserved)
    assert trainer.hooks is not None
    for hook in trainer.hooks.on_save_checkpoint:
        hook(added)
    return {name: value for name, value in added.items() if name not in reserved}


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
