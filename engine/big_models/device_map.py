"""Device maps: the device of each module of a model, and their description as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from ...common.messages import announce, nearest
from ...strategies.distributed import make_view_key
from ..checkpoint import abbreviate
from .memory import Device, format_bytes, get_max_memory, is_accelerator, resolve
from .module_sizes import Dtypes, Part, measure_tensors, split_model
from .module_tensors import READ_FROM_OUTSIDE, group_tied_names, iter_direct_tensors, named_tensors

DeviceMap = dict[str, Device]


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Dtypes | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> DeviceMap:
    """Return a device map that fills one device after the other with modules, in the model's order.

    Modules that share a tensor go to the same device. If modules are offloaded to the CPU or the disk, the device that
    runs them keeps enough memory free for the parameters of the largest offloaded module. Unless buffers are offloaded
    too, memory for the buffers of all offloaded modules is also reserved.

    Args:
        model: The model; it may be on the meta device.
        max_memory: See `get_max_memory`. Modules that do not fit on other devices are placed on disk. The disk has no
            limit unless ``max_memory`` sets one.
        no_split_module_classes: Names of classes whose modules must not be split, such as blocks with a residual
            connection.
        dtype: The dtype in which floating point weights will be loaded. Default: their dtype in the model.
        special_dtypes: Dtypes by tensor name, for tensors that will be loaded in a dtype other than ``dtype``.
        verbose: Log the device map and the size of each entry.
        clean_result: Merge the entries inside a module into one entry if they are all on one device.
        offload_buffers: Assume that the buffers of offloaded modules will be offloaded too.
        fallback_allocation: If an accelerator or the CPU is still empty and the next module does not fit on it, place
            the largest remaining module that fits on it instead. The memory reserved for offloaded modules may then be
            too small.

    Returns:
        The device of each module or tensor, by name. Together, the names cover all tensors.

    Raises:
        ValueError: If an argument is invalid, or if the model does not fit within ``max_memory``.
    """
    room: dict[Device, int | None] = {**get_max_memory(max_memory)}
    room.setdefault("disk", None)
    parts = split_model(model, no_split_module_classes, dtype, special_dtypes)
    placed = _fill(parts, room, None, offload_buffers, fallback_allocation)
    mains = [*(device for device in room if is_accelerator(device) and room[device]), "cpu"]
    if any(device == "disk" or (not is_accelerator(device) and len(mains) > 1) for device in placed.values()):
        placed = _fill_and_run(parts, room, mains, offload_buffers, fallback_allocation)
    placed = {name: placed[name] for name in _iter_in_model_order(model, placed)}
    device_map = clean_device_map(placed) if clean_result else placed
    if verbose:
        announce(device_map_plan(model, device_map, max_memory, dtype, special_dtypes))
    return device_map


def _fill_and_run(
    parts: list[Part], room: Mapping[Device, int | None], mains: list[Device], offload_buffers: bool, fallback: bool
) -> DeviceMap:
    """Fill the devices. Memory to run the offloaded modules is reserved on the first device that gets a module."""
    placed: DeviceMap = {}
    for number, main in enumerate(mains):
        usable = {device: size for device, size in room.items() if device not in mains[:number]}
        placed = _fill(parts, usable, main, offload_buffers, fallback)
        if main in placed.values():
            break
    return placed


def _iter_in_model_order(model: nn.Module, names: Iterable[str]) -> Iterable[str]:
    """Yield the given names in the model's order: each module, its own tensors, then its submodules."""
    name_set = set(names)
    for path, module in model.named_modules(remove_duplicate=False):
        for name in [path, *(f"{path}.{name}" if path else name for name, _ in iter_direct_tensors(module))]:
            if name in name_set:
                yield name


def _fill(
    parts: list[Part], room: Mapping[Device, int | None], main: Device | None, offload_buffers: bool, fallback: bool
) -> DeviceMap:
    """Fill the devices greedily. If ``main`` is set, reserve memory on it to run offloaded modules."""
    reserves = [0]  # memory to reserve for what comes after each part
    largest = buffers = 0
    for part in reversed(parts[1:]):
        largest, buffers = max(largest, part.largest), buffers + part.buffers
        reserves.append(largest + (0 if offload_buffers else buffers))
    waiting = [(part, reserve) for part, reserve in zip(parts, reversed(reserves), strict=False)]
    placed: DeviceMap = {}
    for device, most in room.items():
        used, empty = 0, True

        def fits(part: Part, reserve: int, device: Device = device, most: int | None = most) -> bool:
            return most is None or used + part.size + (reserve if device == main else 0) <= most  # noqa: B023 - at once

        while waiting:
            number = 0
            if not fits(*waiting[0]):
                later = [n for n, entry in enumerate(waiting) if entry[0].size and fits(*entry)]
                if not (fallback and empty and later) or device == "disk":
                    break
                number = max(later, key=lambda n: waiting[n][0].size)
            part, _ = waiting.pop(number)
            placed |= dict.fromkeys(part.names, device)
            used, empty = used + part.size, False
    if waiting:
        unplaced = sum(part.size for part, _ in waiting)
        raise ValueError(
            f"the model does not fit within max_memory: {format_bytes(unplaced)} of its tensors, starting with "
            f"{waiting[0][0].names[0]!r}, can't be assigned to any device. Raise the limit of a device, or remove "
            "'disk' from max_memory to make the disk unlimited."
        )
    return placed


def clean_device_map(device_map: Mapping[str, Device], module_name: str = "") -> DeviceMap:
    """Return a map with a single entry for each module whose entries are all on one device.

    Args:
        device_map: Devices by module or tensor name.
        module_name: Return only the entries of this module. Default: the whole model.
    """
    inside = [name for name in device_map if not module_name or f"{name}.".startswith(f"{module_name}.")]
    if len({device_map[name] for name in inside}) == 1:
        return {module_name: device_map[inside[0]]}
    depth = module_name.count(".") + 1 if module_name else 0
    heads = dict.fromkeys(".".join(name.split(".")[: depth + 1]) for name in inside if name != module_name)
    cleaned = {module_name: device_map[module_name]} if module_name in device_map else {}
    for head in heads:
        cleaned |= clean_device_map(device_map, head)
    return cleaned


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Dtypes | None = None,
    low_zero: bool = False,
) -> dict[Device, int]:
    """Return memory limits with which `infer_auto_device_map` spreads the model evenly over the accelerators.

    The limit of the last accelerator is not lowered.

    Args:
        model: The model; it may be on the meta device.
        max_memory: See `get_max_memory`.
        no_split_module_classes: See `infer_auto_device_map`.
        dtype: See `infer_auto_device_map`.
        special_dtypes: See `infer_auto_device_map`.
        low_zero: Limit the first of several accelerators to what does not fit in the total memory of the others.

    Returns:
        Limits in bytes by device; those of `get_max_memory` if the model cannot be spread.

    Raises:
        ValueError: If an argument is invalid.
    """
    full = get_max_memory(max_memory)
    used = [device for device in full if is_accelerator(device) and full[device] > 0]
    parts = split_model(model, no_split_module_classes, dtype, special_dtypes)
    total = sum(part.size for part in parts)
    if low_zero and len(used) > 1:
        first, *used = used
        full[first] = max(0, min(full[first], total - sum(full[device] for device in used)))
    if len(used) < 2:
        return full

    def limit_memory(limit: int) -> dict[Device, int]:
        return full | {device: min(full[device], limit) for device in used}

    def fits(limit: int) -> bool:
        try:
            _fill(
                parts,
                {device: size for device, size in limit_memory(limit).items() if is_accelerator(device)},
                None,
                True,
                False,
            )
        except ValueError:
            return False
        return True

    low, high = total // len(used), max(full[device] for device in used)
    if not fits(high):
        return full
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return limit_memory(high) | {used[-1]: full[used[-1]]}


def look_up_device(device_map: Mapping[str, Device], name: str) -> Device | None:
    """Return the device that a map assigns to a module or tensor, or to its nearest listed parent; else None.

    Args:
        device_map: Devices by module or tensor name.
        name: The name of the module or tensor.
    """
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return device_map[name]


def check_device_map(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    """Check that a device map can be applied to a model.

    Args:
        model: The model that the map is for.
        device_map: Devices by module or tensor name.

    Raises:
        ValueError: If the map does not fit the model or this machine.
    """
    tensors = named_tensors(model)
    valid_names = {path for path, _ in model.named_modules(remove_duplicate=False)} | tensors.keys()
    for name, device in device_map.items():
        if name not in valid_names:
            raise ValueError(
                f"device_map names {name!r}, but the model has no such module or tensor.{nearest(name, valid_names)}"
            )
        if device != "disk":
            resolve(device, f"device_map[{name!r}]={device!r}", storage=True)
    missed = [name for name in tensors if look_up_device(device_map, name) is None]
    if missed:
        raise ValueError(
            f"device_map has no device for {abbreviate(missed)}. Add an entry for each, or the entry '' for all "
            "tensors that are not listed."
        )
    for names in group_tied_names(tensors):
        _check_together(device_map, names, "are one tensor")
    for path, module in model.named_modules():
        if isinstance(module, READ_FROM_OUTSIDE):
            names = [f"{path}.{name}" if path else name for name in named_tensors(module)]
            _check_together(device_map, names, f"are used together by {type(module).__name__}")


def _check_together(device_map: Mapping[str, Device], names: list[str], why: str) -> None:
    first = look_up_device(device_map, names[0])
    for name in names:
        if (device := look_up_device(device_map, name)) != first:
            raise ValueError(
                f"device_map assigns {names[0]!r} to {first!r} and {name!r} to {device!r}, but they {why}. Assign both "
                "to the same device."
            )


def device_map_plan(
    model: nn.Module,
    device_map: Mapping[str, Device],
    max_memory: Mapping[Device, int | str] | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Dtypes | None = None,
) -> str:
    """Return a device map as text: for each device, the memory that its weights take, its limit, and its modules.

    A tied tensor is counted once.
    """
    bytes_of, room = measure_tensors(model, dtype, special_dtypes), get_max_memory(max_memory)
    tensors = named_tensors(model)
    devices = {make_view_key(tensor): look_up_device(device_map, name) for name, tensor in tensors.items()}
    lines = []
    for device in dict.fromkeys(device_map.values()):
        used = sum(bytes_of[key] for key, place in devices.items() if place == device)
        limit = f" of {format_bytes(room[device])}" if device in room else ""
        names = [name or "(the model)" for name, place in device_map.items() if place == device]
        lines.append(f"{device}: {format_bytes(used)}{limit} for {abbreviate(names)}")
    return "\n".join(lines)
