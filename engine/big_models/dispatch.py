"""Dispatch of a model over devices, main memory and disk, for inference."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.messages import announce
from ..checkpoint import MemoryPiece, Piece, UnreadTensor, Weights, abbreviate
from ..weights import open_weights
from .device_map import check_device_map, look_up_device
from .hooks import ForwardHooks, OffloadedTensor, make_placeholder, restore
from .memory import Device, is_accelerator, resolve
from .model_hooks import CpuOffload, UserCpuOffloadHook, add_hook_to_module, remove_hook_from_module
from .module_sizes import check_class_names
from .module_tensors import (
    READ_FROM_OUTSIDE,
    copy_attributes,
    group_tied_names,
    is_buffer,
    iter_direct_tensors,
    list_class_names,
    named_tensors,
    set_tensor_by_names,
)
from .offload_file import INDEX, check_shapes, open_offloaded, share_tied_values, write_weights

Skip = str | list[str] | None


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: Skip = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Place a model's modules on the devices of a device map, for inference.

    Code that calls the model does not need to change. Weights on disk are loaded onto the main device when the module
    that uses them is called, and released after the call. The same applies to weights on the CPU if the main device is
    not the CPU. The inputs of a module are moved to the device that runs it. The model's outputs are moved to the
    device of the first tensor in the model's inputs. If one device runs the whole model and no weights are offloaded,
    neither inputs nor outputs are moved.

    Args:
        model: The model, which is changed in place; it may be on the meta device.
        device_map: Devices by module or tensor name. A module or tensor that is not in the map is placed on the device
            of its nearest parent in the map.
        main_device: The device that runs offloaded modules. Default: the first accelerator of the map, else the CPU.
        state_dict: Values by tensor name, for tensors that are offloaded to the CPU and for tensors on the meta device
            that are not offloaded to disk. Default: the model's own.
        offload_dir: Folder to which the weights that the map places on disk are written. If these weights are on the
            meta device, pass the path or URL of the checkpoint that contains them. Weights that Accelerate's functions
            have already offloaded to the folder (listed in ``index.json``) replace the model's own, as in Accelerate.
        offload_index: Entries of offloaded weights by name, in the format of Accelerate's ``index.json``. They are used
            instead of the folder's ``index.json``.
        offload_buffers: Offload buffers of offloaded modules too.
        skip_keys: Names of keyword arguments whose values are not moved. If the model's output is a mapping, its
            values under these keys are not moved either.
        preload_module_classes: Names of classes whose modules read the weights of their submodules without calling the
            submodules. All these weights are loaded when such a module is called.
        force_hooks: Add the hooks that move inputs and outputs even if they are not needed. Default: False.

    Returns:
        The model, with the map as its ``hf_device_map``.

    Raises:
        ValueError: If an argument is invalid, weights have no values or the wrong shape, or the model is already
            dispatched.
        OSError: If weights cannot be written to ``offload_dir`` or downloaded from it.
    """
    refuse_twice(model)
    check_device_map(model, device_map)
    weights: Weights = {name: MemoryPiece(tensor) for name, tensor in (state_dict or {}).items()}
    main = resolve_main_device(device_map, main_device)
    on_disk = {
        name: tensor
        for name, tensor in named_tensors(model).items()
        if look_up_device(device_map, name) == "disk" and (offload_buffers or not is_buffer(tensor))
    }
    if on_disk:
        weights |= _disk_weights(on_disk, offload_dir, offload_index)
    return dispatch(model, device_map, main, weights, offload_buffers, skip_keys, preload_module_classes, force_hooks)


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep a model's weights in main memory and move each module's weights to a device when the module is called.

    Args:
        model: The model, which is changed in place.
        execution_device: The device that runs the model. Default: the device of the model's first parameter, or the CPU
            if the model has no parameters or the first one is on the meta device.
        offload_buffers: Offload buffers too.
        state_dict: Values for the weights, by name. Default: the model's own.
        preload_module_classes: See `dispatch_model`.

    Returns:
        The model.

    Raises:
        ValueError: See `dispatch_model`.
    """
    main = _resolve_execution_device(model, execution_device)
    weights: Weights = {name: MemoryPiece(tensor) for name, tensor in (state_dict or {}).items()}
    return dispatch(
        model,
        {"": "cpu"},
        main,
        weights,
        offload_buffers,
        preload_module_classes=preload_module_classes,
        all_away=True,
    )


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep a model's weights on disk and read each module's weights when the module is called.

    Args:
        model: The model, which is changed in place; it may be on the meta device.
        offload_dir: See `dispatch_model`.
        execution_device: See `cpu_offload`.
        offload_buffers: Offload buffers too.
        preload_module_classes: See `dispatch_model`.

    Returns:
        The model.

    Raises:
        ValueError, OSError: See `dispatch_model`.
    """
    main = _resolve_execution_device(model, execution_device)
    return dispatch_model(
        model,
        {"": "disk"},
        main,
        offload_dir=offload_dir,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model in main memory, and move the whole model to a device when it is called.

    The model remains on the device until ``offload()`` of the returned hook is called. The function is intended for
    models that run one after another. Each call to the model first moves the model of ``prev_module_hook`` to main
    memory.

    Args:
        model: The model, which is changed in place.
        execution_device: The device that runs the model. Default: the first accelerator, else the CPU.
        prev_module_hook: The hook of the model that runs before this one.

    Returns:
        The model and its hook.

    Raises:
        ValueError: If ``execution_device`` is invalid or not on this machine.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def find_loading_hooks(module: nn.Module) -> ForwardHooks | None:
    """Return the hooks that load offloaded tensors when a module is called; None if it has none.

    Args:
        module: A module of a dispatched model.
    """
    return next((hooks for hooks in _find_hooks([module]) if hooks.offloaded), None)


def is_dispatched(model: nn.Module) -> bool:
    """Return whether a model is on several devices or offloaded.

    Such a model cannot be trained in a distributed run.
    """
    places = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
    if len(places) > 1 or "disk" in places:
        return True
    return any(hooks.offloaded for hooks in _find_hooks(model.modules()))


def list_offloaded(model: nn.Module) -> dict[str, UnreadTensor]:
    """Return references to the offloaded tensors of a model by name. Tied tensors share a reference.

    Args:
        model: The dispatched model.
    """
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(f"{name}." if name else "")
    offloaded = [tensor for hooks in _find_hooks(model.modules()) for tensor in hooks.offloaded]
    references: dict[int, UnreadTensor] = {}
    return {
        prefix + tensor.name: references.setdefault(
            id(tensor.placeholder), UnreadTensor(tensor.piece, tensor.shape.dtype)
        )
        for tensor in offloaded
        for prefix in names[id(tensor.module)]
    }


def remove_hook_from_submodules(model: nn.Module) -> nn.Module:
    """Undo a dispatch. Offloaded weights return to main memory, and other weights are not moved.

    Every `ModelHook` of the model and of the modules inside it is removed too.

    Args:
        model: The dispatched model.

    Returns:
        The model.
    """
    remove_hook_from_module(model, recurse=True)
    hooks = _find_hooks(model.modules())
    for hook in hooks:
        hook.detach()
    restore((tensor, torch.device("cpu")) for hook in hooks for tensor in hook.offloaded)
    if hasattr(model, "hf_device_map"):
        del model.hf_device_map
    return model


def _find_hooks(modules: Iterable[nn.Module]) -> list[ForwardHooks]:
    owners = (getattr(hook, "__self__", None) for m in modules for hook in m._forward_pre_hooks.values())
    return [owner for owner in owners if isinstance(owner, ForwardHooks)]


def resolve_main_device(device_map: Mapping[str, Device], main_device: Device | None = None) -> torch.device:
    """Return the device that runs offloaded modules: by default the first accelerator of the map, else the CPU."""
    if main_device is None:
        main_device = next((device for device in device_map.values() if is_accelerator(device)), "cpu")
    return resolve(main_device, f"main_device={main_device!r}")


def dispatch(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main: torch.device,
    weights: Mapping[str, Piece],
    offload_buffers: bool = False,
    skip_keys: Skip = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    all_away: bool = False,
) -> nn.Module:
    """Dispatch a model with a checked map and opened weights; see `dispatch_model`.

    ``weights`` contains the values of offloaded tensors and of tensors on the meta device, by name. An offloaded tensor
    without an entry keeps the model's own values. ``all_away`` offloads all weights, regardless of the device that the
    map assigns to them.
    """
    refuse_twice(model)
    tensors = named_tensors(model)
    places = {name: look_up_device(device_map, name) for name in tensors}

    def is_away(device: Device | None) -> bool:
        return all_away or device == "disk" or (not is_accelerator(device or "cpu") and main.type != "cpu")

    def runs_on(name: str) -> torch.device:
        device = look_up_device(device_map, name)
        return main if device is None or is_away(device) else resolve(device)

    needed = {name: tensor for name, tensor in tensors.items() if str(places[name]).split(":")[0] != "meta"}
    check_shapes(needed, weights)
    weights = share_tied_values(tensors, weights)
    if empty := [n[0] for n in group_tied_names(needed) if needed[n[0]].is_meta and n[0] not in weights]:
        raise ValueError(f"the model has no values for {abbreviate(empty)}. Load a checkpoint with these values.")
    pieces: dict[str, Piece] = {}  # of offloaded tensors
    for names in group_tied_names(tensors):
        name, old = names[0], tensors[names[0]]
        device = runs_on(name)
        if is_away(places[name]) and (offload_buffers or not is_buffer(old)):
            pieces |= dict.fromkeys(names, weights.get(name) or MemoryPiece(old.detach().to("cpu")))
        elif old.device != device:
            if old.is_meta and device.type != "meta":  # its values are in a file
                new = torch.empty_like(old, device=device)
                weights[name].fill(new)
            else:
                new = old.detach().to(device)
            set_tensor_by_names(model, names, copy_attributes(old, new))
    if pieces or force_hooks or len({runs_on(name) for name in device_map}) > 1:
        _install(model, runs_on, pieces, set(device_map), main, skip_keys, preload_module_classes)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def refuse_twice(model: nn.Module) -> None:
    """Raise a ValueError if a model has hooks of an earlier dispatch, which would load outdated weights."""
    if _find_hooks(model.modules()):
        raise ValueError("the model is already dispatched. Call remove_hook_from_submodules(model) first.")


def _disk_weights(
    tensors: Mapping[str, Tensor], folder: str | os.PathLike[str] | None, index: Mapping[str, Any] | None
) -> Weights:
    """Return the weights on disk by name, without reading them.

    These are the weights that were offloaded earlier, those of a checkpoint in ``folder``, and the model's own, which
    this function writes to ``folder``.
    """
    offloaded = open_offloaded(folder, index)
    covered = {name for names in group_tied_names(tensors) if any(n in offloaded for n in names) for name in names}
    if replaced := [name for name in tensors if name in covered and not tensors[name].is_meta]:
        announce(
            "the values that were offloaded earlier "
            f"({'offload_index' if index is not None else Path(str(folder)) / INDEX}) replace the model's own values "
            f"for {abbreviate(replaced)}."
        )
    tensors = {name: tensor for name, tensor in tensors.items() if name not in covered}
    if offloaded and any(tensor.is_meta for tensor in tensors.values()):
        empty = [name for name, tensor in tensors.items() if tensor.is_meta]
        raise ValueError(
            f"neither the model nor the offloaded weights have values for {abbreviate(empty)}. Load a checkpoint with "
            "these values."
        )
    if not tensors:
        return offloaded
    if folder is None:
        raise ValueError(
            f"device_map assigns {abbreviate(list(tensors))} to 'disk', but offload_dir is not set. Set offload_dir to "
            "a folder for the offloaded weights."
        )
    weights = open_weights(folder) if any(tensor.is_meta for tensor in tensors.values()) else {}
    firsts = [names[0] for names in group_tied_names(tensors)]
    real = {name: tensors[name] for name in firsts if not tensors[name].is_meta}
    return offloaded | weights | (write_weights(folder, real) if real else {})


def _resolve_execution_device(model: nn.Module, device: Device | None) -> torch.device:
    if device is not None:
        return resolve(device, f"execution_device={device!r}")
    first_device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return torch.device("cpu") if first_device.type == "meta" else first_device


def _install(
    model: nn.Module,
    runs_on: Callable[[str], torch.device],
    pieces: Mapping[str, Piece],
    entries: set[str],
    main: torch.device,
    skip_keys: Skip,
    preload_module_classes: list[str] | None,
) -> None:
    whole = check_class_names(model, "preload_module_classes", preload_module_classes)
    skip = frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys or ())
    shapes: dict[str, Tensor] = {}
    for names in group_tied_names(tensors := named_tensors(model)):
        if names[0] in pieces:
            shape, placeholder = make_placeholder(tensors[names[0]])
            shapes |= dict.fromkeys(names, shape)
            set_tensor_by_names(model, names, placeholder)
    moves = any(runs_on(name).type != "cpu" for name in [*entries, *tensors])
    offloaded: dict[str, list[OffloadedTensor]] = {}
    hooked: dict[str, nn.Module] = {}
    visited: set[nn.Module] = set()

    def visit(path: str, module: nn.Module, around: str | None) -> None:
        if module in visited:
            return
        visited.add(module)
        if around is None and (isinstance(module, READ_FROM_OUTSIDE) or list_class_names(module) & whole):
            around = path
        owned = list(iter_direct_tensors(module))
        if around in (None, path) and (around == path or (moves and (owned or path in entries))):
            hooked[path] = module
        for name, tensor in owned:
            if (full := f"{path}.{name}" if path else name) in pieces:
                loader = path if around is None else around
                offloaded.setdefault(loader, []).append(
                    OffloadedTensor(module, name, pieces[full], shapes[full], tensor)
                )
                hooked.setdefault(loader, module)
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child, around)

    visit("", model, None)
    for path, module in hooked.items():
        if moves or path in offloaded:
            first = next(iter(named_tensors(module)), "")
            name = path if path in entries else f"{path}.{first}".strip(".")
            ForwardHooks(runs_on(name), offloaded.get(path, []), moves_inputs=moves, skip=skip).attach(module)
    ForwardHooks(main, [], returns=True, skip=skip).attach(model)
