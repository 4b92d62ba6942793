"""Update of optimizers that were created before their model was sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..distributed import World, cut_like, is_sharded

# They compute with all elements of a parameter, or index some of them, which torch does not support for shards (2.13).
_NEED_WHOLE = (torch.optim.LBFGS, torch.optim.Rprop, torch.optim.Adafactor)


def hand_over(optimizer: Optimizer, moved: Mapping[Tensor, Tensor], world: World) -> None:
    """Replace the parameters of ``optimizer`` with their shards, and shard their state.

    ``moved`` maps each original parameter to its sharded parameter. State tensors, except 0-d ones, are copied from
    rank zero.
    """
    if isinstance(optimizer, _NEED_WHOLE):
        raise ValueError(
            f"{type(optimizer).__name__} needs full parameters, but each process has only shards of them. Use AdamW, "
            "SGD, Adagrad or another elementwise optimizer, or strategy='ddp'."
        )
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if is_sharded(parameter):
                continue
            if parameter not in moved:
                raise ValueError(
                    f"an optimizer has a parameter of shape {tuple(parameter.shape)} that does not belong to a "
                    "prepared model. Prepare the model before its optimizer, or both in one call."
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
            "an optimizer has state for parameters that had no values when the optimizer was created. Create the "
            "optimizer after the model is prepared."
        )
    if value.shape != before.shape:
        raise ValueError(
            f"optimizer state of shape {tuple(value.shape)} for a parameter of shape {tuple(before.shape)} can't be "
            "sharded like the parameter. Prepare the optimizer before its first step."
        )
    whole = value.to(after.device, copy=True).contiguous()
    return cut_like(world.broadcast_tensor(whole), after)
