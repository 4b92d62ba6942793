"""Options with which a script builds its optimizers and schedules."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

State = dict[str, Any]

IMPLEMENTATION_OPTIONS = {"foreach", "fused", "capturable", "differentiable"}
"""Options of the implementation, not of the algorithm; torch chooses some of them itself."""
_NOT_COMPARED = {"params", "param_names", *IMPLEMENTATION_OPTIONS}
# The position of a scheduler, and values that follow from its other arguments or from the optimizer's options.
_POSITION = {"last_epoch", "T_cur", "T_i", "base_lrs", "optimizer", "best", "num_bad_epochs", "cooldown_counter"}
_NESTED = {"_schedulers", "_milestones"}  # `SequentialLR` stores its arguments under these names


class BuiltSchedule:
    """State of a scheduler before its first step in this process.

    Attributes:
        state: A copy of its ``state_dict``.
        arguments: The arguments with which the script created the scheduler, as far as ``state`` contains them, by
            dotted name.
        effective_arguments: The arguments that checkpoints record: ``arguments`` or, after a resume that uses the saved
            schedule, those in the checkpoint.
        options: The options of its optimizer's parameter groups.
    """

    def __init__(self, scheduler: Any) -> None:
        self.state: State = copy.deepcopy(scheduler.state_dict())
        self.arguments: State = dict(_iter_arguments(self.state))
        self.effective_arguments = self.arguments
        driven = getattr(scheduler, "optimizer", None)
        self.options = copy_plain_options(driven) if isinstance(driven, Optimizer) else []


def copy_plain_options(optimizer: Optimizer) -> list[State]:
    """Return the options of an optimizer's parameter groups, such as ``lr`` and ``weight_decay``, as plain data.

    The list contains one dict for each group. Options of the implementation, such as ``fused``, and options that are
    not plain data are omitted.
    """
    return [
        {
            name: to_plain(value)
            for name, value in group.items()
            if name not in _NOT_COMPARED and _is_plain(to_plain(value))
        }
        for group in optimizer.param_groups
    ]


def choose_fused(optimizer: Optimizer, device: torch.device) -> bool:
    """Enable torch's fused ``Adam`` and ``AdamW`` kernels on CUDA, if the script did not choose an implementation.

    The fused kernels can skip a step on the device. SGD keeps torch's default, because its fused kernel fails if a
    parameter gets its first gradient later than other parameters (torch 2.13).

    Returns:
        Whether the kernels were enabled.
    """
    groups = optimizer.param_groups
    is_open = (
        device.type == "cuda"
        and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        and not optimizer.state
        and all(group["fused"] is None and group["foreach"] is None for group in groups)
        and not any(group["capturable"] or group["differentiable"] for group in groups)
        and all(parameter.is_floating_point() for group in groups for parameter in group["params"])
    )
    if is_open:
        for options in (optimizer.defaults, *groups):
            options["fused"] = True
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # what its __init__ does for it
    return is_open


def to_plain(value: Any) -> Any:
    """Return an option as plain data: a list for a tuple, a number for a one-element tensor, None for other tensors."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    return list(map(to_plain, value)) if isinstance(value, list | tuple) else value


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, bool | int | float | str | None)


def _iter_arguments(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Counter):  # the milestones of `MultiStepLR`
        value = sorted(value.elements())
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key not in _POSITION and (key in _NESTED or not str(key).startswith("_")):
                yield from _iter_arguments(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for number, item in enumerate(value):
            yield from _iter_arguments(item, f"{name}[{number}]")
    elif _is_plain(value := to_plain(value)):
        yield name, value
