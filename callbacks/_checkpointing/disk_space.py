"""Estimate of a checkpoint's size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...strategies import iter_tensors

if TYPE_CHECKING:
    from ...trainer import Trainer

# Number of tensors of a parameter's size that torch's optimizers create in their first step, and the options that
# add one. Other optimizers count as 0, because an estimate that is too high would end a run without need.
_STATES: dict[str, tuple[int, tuple[str, ...]]] = {
    "Adadelta": (2, ()),
    "Adagrad": (1, ()),
    "Adam": (2, ("amsgrad",)),
    "AdamW": (2, ("amsgrad",)),
    "Adamax": (2, ()),
    "ASGD": (1, ()),
    "NAdam": (2, ()),
    "RAdam": (2, ()),
    "RMSprop": (1, ("momentum", "centered")),
    "Rprop": (2, ()),
    "SGD": (0, ("momentum",)),
}


def estimate_checkpoint_bytes(trainer: Trainer, weights_only: bool, trainable_only: bool = False) -> int:
    """Return the estimated size in bytes of one checkpoint, over all processes.

    For optimizer states, the size is a lower bound, provided that every trainable parameter gets a gradient.

    Args:
        trainer: The Trainer, with its task and optimizers already created.
        weights_only: Omit optimizer states.
        trainable_only: Omit frozen weights. Default: False.
    """
    assert trainer.task is not None
    frozen = {name for name, p in trainer.task.named_parameters(remove_duplicate=False) if not p.requires_grad}
    saved = {n: t for n, t in trainer.task.state_dict().items() if isinstance(t, Tensor)}
    sizes = {_identify_storage(t): _count_bytes(t) for n, t in saved.items() if not (trainable_only and n in frozen)}
    needed = sum(sizes.values())
    return needed if weights_only else needed + sum(map(_count_optimizer_bytes, trainer.optimizers))


def _count_optimizer_bytes(optimizer: Optimizer) -> int:
    """Return the size of an optimizer's state in bytes, or an estimate if the state has not been created yet."""
    state_bytes = sum(_count_bytes(value) for state in optimizer.state.values() for value in iter_tensors(state))
    if state_bytes:
        return state_bytes
    kind = next((c.__name__ for c in type(optimizer).__mro__ if c.__module__.startswith("torch.optim.")), "")
    always, options = _STATES.get(kind, (0, ()))
    return sum(
        (always + sum(bool(group.get(option)) for option in options)) * _count_bytes(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    )


def _count_bytes(tensor: Tensor) -> int:
    # The full size of a sharded tensor; the size of a lazy one is unknown before its layer's first batch.
    return 0 if is_lazy(tensor) else tensor.numel() * tensor.element_size()


def _identify_storage(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is the same for tied tensors."""
    try:
        return tensor.device, tensor.data_ptr() or id(tensor), tensor.shape
    except (RuntimeError, NotImplementedError, ValueError):  # a subclass without its own memory, or a lazy tensor
        return (id(tensor),)
