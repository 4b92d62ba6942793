"""An optimizer that was made before its model was sharded gets the shards, and its state is cut like them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..distributed import World, cut_like, is_sharded

# They compute with all elements of a parameter, or index some of them, for which torch has no sharded form (2.13).
_NEED_WHOLE = (torch.optim.LBFGS, torch.optim.Rprop, torch.optim.Adafactor)


def hand_over(optimizer: Optimizer, moved: Mapping[Tensor, Tensor], world: World) -> None:
    """Replace the parameters that ``optimizer`` holds.

    Args:
        optimizer: the user's own.
        moved: what became of each parameter.
        world: all processes; state that is there already is rank zero's.

    Raises:
        ValueError: if it can't work on shards, or holds parameters of a model that is not prepared.
    """
    if isinstance(optimizer, _NEED_WHOLE):
        raise ValueError(
            f"{type(optimizer).__name__} computes with whole parameters, and here each process has a part of them. "
            "Use AdamW, SGD, Adagrad or another that treats elements alike, or strategy='ddp'."
        )
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if is_sharded(parameter):
                continue
            if parameter not in moved:
                raise ValueError(
                    f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that no prepared model has. "
                    "Prepare the model before its optimizer, or both in one call."
                )
            group["params"][index] = moved[parameter]
            state = optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[moved[parameter]] = {
                    name: _cut(value, parameter, moved[parameter], world) for name, value in state.items()
                }


def _cut(value: Any, before: Tensor, after: Tensor, world: World) -> Any:
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    if value.is_meta:
        raise ValueError(
            "an optimizer keeps values for parameters that had none when it was made. Make it after the model is "
            "prepared."
        )
    if value.shape != before.shape:
        raise ValueError(
            f"an optimizer that has taken steps keeps a state of shape {tuple(value.shape)} for a parameter of shape "
            f"{tuple(before.shape)}, which can't be sharded like it; prepare it before the first step."
        )
    whole = value.to(after.device, copy=True).contiguous()
    return cut_like(world.broadcast_tensor(whole), after)
