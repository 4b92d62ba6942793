"""Check before the first step that the state of a run can be saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...engine.checkpoint import check_tensor, encode
from ...engine.optim import storable_state
from ...strategies.distributed import is_sharded
from ..checkpointing import collect_callback_states

if TYPE_CHECKING:
    from ..core import TaskModule
    from ..trainer import Trainer

# Registered by the Trainer; callbacks are checked one by one.
_TRAINER_ENTRIES = ("progress", "logged", "metrics", "callbacks")


def check_storable(trainer: Trainer, task: TaskModule) -> None:
    """Check that the state that this run saves in checkpoints can be encoded.

    State that exists only later, such as that of optimizers, is checked at the first save.

    Raises:
        TypeError, ValueError: If a state of this process cannot be saved.
        PeerFailed: If only another process has such a state.
    """
    if not any(callback.saves for callback in trainer.checkpoint_callbacks):
        return
    with trainer.accelerator.world.failing_together():
        for owner, state in _iterate_states(trainer, task):
            try:
                encode(state)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{owner} cannot be saved in a checkpoint: {error}") from error
        _check_weights(task)


def _iterate_states(trainer: Trainer, task: TaskModule) -> Iterator[tuple[str, Any]]:
    accelerator = trainer.accelerator
    for owner in (task, trainer.datamodule):
        if owner is not None:
            stored_form = owner.stored_hparams()
            owner.check_hparams(stored_form)
            yield f"{type(owner).__name__}.hparams", stored_form.values
    for name, state in collect_callback_states(trainer.callbacks).items():
        yield f"the state of the callback {name}", state
    for name, value in accelerator.registered.items():
        if name == "datamodule":
            yield f"the state of {type(trainer.datamodule).__name__}", value.state_dict()
        elif name not in _TRAINER_ENTRIES:
            yield f"the state of the object registered as {name!r}", value.state_dict()
    for scheduler in accelerator.schedulers:
        yield f"the state of {type(scheduler).__name__}", storable_state(scheduler)
    for loader in accelerator.loaders:
        yield f"the state of the dataloader {type(loader.source).__name__}", loader.state_dict()
    for optimizer in trainer.optimizers:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        yield f"{type(optimizer).__name__}.param_groups", groups


def _check_weights(task: nn.Module) -> None:
    extra: dict[str, Any] = {}
    for name, value in task.state_dict().items():
        if not isinstance(value, Tensor):
            extra[name] = value
        elif not (is_sharded(value) or is_lazy(value)):  # the first batch gives a lazy layer its weights
            check_tensor(value, f"{type(task).__name__}.{name}")
    try:
        encode(extra)
    except (TypeError, ValueError) as error:
        raise type(error)(f"the result of get_extra_state cannot be saved in a checkpoint: {error}") from error
