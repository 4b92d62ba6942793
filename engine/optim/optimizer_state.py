"""Options with which a script builds optimizers and schedules, and optimizer states keyed by parameter name."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...common.messages import format_count
from ...strategies.distributed import cut_like, is_sharded, strip_compile_prefix
from ..checkpoint import OptimizerState, Stored

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


def refuse_unequal_kernels(optimizer: Optimizer) -> None:
    """Raise a ValueError if a step of ``optimizer`` may have other bits on shards, for ``step_micro_batches``.

    Fused kernels round an element in another way if it is near the end of its tensor (torch 2.13 on CPU).
    """
    obstacle = type(optimizer).__name__ if isinstance(optimizer, torch.optim.LBFGS) else None
    if any(group.get("fused") for group in optimizer.param_groups):
        obstacle = f"{type(optimizer).__name__}(fused=True)"
    if obstacle is not None:
        raise ValueError(
            f"step_micro_batches can't be combined with {obstacle}, whose rounding depends on how parameters are "
            "sharded. Use an elementwise optimizer with foreach=True, or remove step_micro_batches."
        )


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


# -- states by parameter name ---------------------------------------------------------------------------------------


def list_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the optimizer's parameters in the order in which ``state_dict`` numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def name_parameters(optimizer: Optimizer, models: Iterable[nn.Module]) -> list[str]:
    """Return a name for each of the optimizer's parameters, in the optimizer's order.

    The names are those of the models. A parameter of the second model has the prefix ``1:``. A parameter that belongs
    to no model is named after its index in the optimizer, such as ``parameter 3``.
    """
    names_by_id: dict[int, str] = {}
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            names_by_id.setdefault(
                id(parameter), strip_compile_prefix(name) if number == 0 else f"{number}:{strip_compile_prefix(name)}"
            )
    return [names_by_id.get(id(p), f"parameter {index}") for index, p in enumerate(list_parameters(optimizer))]


def find_unowned_parameters(optimizer: Optimizer, models: Iterable[nn.Module]) -> list[Tensor]:
    """Return the optimizer's parameters that belong to none of the models."""
    model_ids = {id(parameter) for model in models for parameter in model.parameters()}
    return [parameter for parameter in list_parameters(optimizer) if id(parameter) not in model_ids]


def name_class(optimizer: Optimizer) -> str:
    """Return the qualified name of the optimizer's class, including its module."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def encode_by_name(state: State, optimizer: Optimizer, names: list[str]) -> OptimizerState:
    """Return an optimizer's state keyed by parameter name, with its class and the parameters' shapes and dtypes.

    ``state`` is the result of ``state_dict``, whose tensors may be this process's shards.
    """
    extras = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    slots = state["state"]
    return {
        "class": name_class(optimizer),
        "shapes": {name: list(p.shape) for name, p in zip(names, list_parameters(optimizer), strict=True)},
        "formats": {name: p.dtype for name, p in zip(names, list_parameters(optimizer), strict=True)},
        "groups": [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]],
        "slots": {names[i]: slots[i] for i in range(len(names)) if i in slots},
        "unnamed": {key: value for key, value in slots.items() if not _is_index(key, names)},
        "others": extras,
    }


def _is_index(key: Any, names: list[str]) -> bool:
    return isinstance(key, int) and 0 <= key < len(names)


def follow_replaced(saved: OptimizerState, optimizer: Optimizer, names: list[str]) -> OptimizerState:
    """Return a saved state in which parameters of no model have the names of those in their place in ``optimizer``.

    A run that replaces a layer, for example by a copy of another one, still has the former parameters in its optimizer.
    When it is resumed, the optimizer gets those of the layer's present tensors.
    """
    current = {f"parameter {i}": item for i, item in enumerate(zip(names, list_parameters(optimizer), strict=True))}
    renamed = {
        key: name
        for key, (name, parameter) in current.items()
        if name not in saved["shapes"] and saved["shapes"].get(key) == list(parameter.shape)
    }
    return {
        **saved,
        "shapes": {renamed.get(name, name): shape for name, shape in saved["shapes"].items()},
        "formats": {renamed.get(name, name): dtype for name, dtype in saved["formats"].items()},
        "slots": {renamed.get(name, name): slot for name, slot in saved["slots"].items()},
        "groups": [{**group, "params": [renamed.get(n, n) for n in group["params"]]} for group in saved["groups"]],
    }


def list_differences(saved: OptimizerState, optimizer: Optimizer, names: list[str]) -> list[str]:
    """Return the differences between a state returned by `encode_by_name` and an optimizer, as one text for each.

    The class and the names and shapes of the parameters are compared. If they are equal, the division of the parameters
    into groups is compared too.
    """
    lines = []
    if saved["class"] != name_class(optimizer):
        lines.append(f"optimizer: {saved['class']} in the checkpoint, {name_class(optimizer)} in this run")
    shapes = {name: list(p.shape) for name, p in zip(names, list_parameters(optimizer), strict=True)}
    lines += [f"missing: {name}" for name in shapes if name not in saved["shapes"]]
    lines += [f"unexpected: {name}" for name in saved["shapes"] if name not in shapes]
    lines += [
        f"{name}: {tuple(saved_shape)} in the checkpoint, {tuple(shapes[name])} in this run"
        for name, saved_shape in saved["shapes"].items()
        if name in shapes and saved_shape != shapes[name]
    ]
    if not lines and _list_group_members(saved["groups"]) != _list_group_members(_name_groups(optimizer, names)):
        saved_groups, current_groups = format_count(len(saved["groups"]), "group"), len(optimizer.param_groups)
        lines.append(
            f"the parameters are in different groups: {saved_groups} in the checkpoint, {current_groups} in this run"
        )
    return lines


def _name_groups(optimizer: Optimizer, names: list[str]) -> list[State]:
    remaining = iter(names)
    return [
        {**group, "params": list(itertools.islice(remaining, len(group["params"])))} for group in optimizer.param_groups
    ]


def _list_group_members(groups: list[State]) -> list[frozenset[str]]:
    return [frozenset(group["params"]) for group in groups]


def _find_counterpart(group: State, saved: list[State]) -> State:
    """Return the saved group that contains parameters of ``group``; if none or several do, return ``group``."""
    owners = [saved_group for saved_group in saved if not set(group["params"]).isdisjoint(saved_group["params"])]
    return owners[0] if len(owners) == 1 else group


def decode_by_name(saved: OptimizerState, optimizer: Optimizer, names: list[str]) -> State:
    """Convert a state from `encode_by_name` for ``optimizer.load_state_dict``, with this process's shards.

    Implementation options, such as ``fused``, come from the script. If the state and the optimizer differ, the result
    contains only the slots of parameters with the same name and shape. If the division into parameter groups differs, a
    group takes the options of the saved group that contained its parameters, because a schedule continues from the
    saved learning rate. If none or several saved groups contained them, the options come from the script.
    """
    parameters = dict(zip(names, list_parameters(optimizer), strict=True))
    index = {name: i for i, name in enumerate(names)}
    current_groups = _name_groups(optimizer, names)
    alike = _list_group_members(saved["groups"]) == _list_group_members(current_groups)
    options = saved["groups"] if alike else [_find_counterpart(group, saved["groups"]) for group in current_groups]
    groups = [
        {
            **_read_tensors(saved_group, None),
            **{name: group[name] for name in IMPLEMENTATION_OPTIONS & group.keys()},
            "params": [index[name] for name in group["params"]],
        }
        for group, saved_group in zip(current_groups, options, strict=True)
    ]
    fits = [name for name, shape in saved["shapes"].items() if name in index and shape == list(parameters[name].shape)]
    formats = saved["formats"]
    slots = {index[n]: _read_tensors(saved["slots"][n], parameters[n], formats[n]) for n in fits if n in saved["slots"]}
    extras = _read_tensors({"others": saved["others"], "unnamed": saved["unnamed"]}, None)
    return {**extras["others"], "state": {**slots, **extras["unnamed"]}, "param_groups": groups}


def keep_formats(optimizer: Optimizer, state: State) -> None:
    """Restore the saved dtype of each slot, because ``load_state_dict`` casts slots to the parameter's dtype.

    For example, ``mu_product`` of NAdam is float32 even for float64 parameters (torch 2.13).
    """
    for index, parameter in enumerate(list_parameters(optimizer)):
        slots = optimizer.state.get(parameter, {})
        for name, saved in state["state"].get(index, {}).items():
            slot = slots.get(name)
            if isinstance(slot, Tensor) and isinstance(saved, Tensor) and slot.dtype != saved.dtype:
                slots[name] = saved.to(slot.device)


def _read_tensors(value: Any, parameter: Tensor | None, saved_dtype: torch.dtype | None = None) -> Any:
    """Read the tensors of a nested state into memory; those with the shape of ``parameter`` are sharded like it.

    Slots whose dtype was that of the saved parameter are cast to the parameter's current dtype.
    """
    if isinstance(value, Mapping):
        return {key: _read_tensors(item, parameter, saved_dtype) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_read_tensors(item, parameter, saved_dtype) for item in value)
    if not isinstance(value, Stored):
        return value
    alike = is_sharded(parameter) and value.shape == parameter.shape  # type: ignore[union-attr]
    tensor = cut_like(value, parameter) if alike else value.read()
    changes = parameter is not None and tensor.dtype == saved_dtype and (tensor.ndim or not parameter.ndim)
    return tensor.to(parameter.dtype) if changes else tensor  # type: ignore[union-attr]
