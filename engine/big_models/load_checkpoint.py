"""Loading of a checkpoint into a model, tensor by tensor, without a second copy of the weights in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...common.messages import announce, warn
from ...common.validation import choose
from ..checkpoint import Piece, Weights, abbreviate
from ..quantization import WeightQuantizer
from ..weights import open_weights
from .device_map import check_device_map, device_map_plan, get_balanced_memory, infer_auto_device_map, look_up_device
from .dispatch import Skip, dispatch, refuse_twice, resolve_main_device
from .memory import Device, resolve
from .module_tensors import (
    copy_attributes,
    find_unsaved_names,
    group_tied_names,
    is_buffer,
    named_tensors,
    parse_dtype,
    resolve_stored_dtype,
    set_tensor_by_names,
)
from .offload_file import check_shapes, share_tied_values

Checkpoint = str | os.PathLike[str]


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: Checkpoint,
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    offload_folder: Checkpoint | None = None,
    offload_buffers: bool = False,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: Skip = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    quantization: str | WeightQuantizer | None = None,
) -> nn.Module:
    """Load a checkpoint into a model and dispatch the model over devices.

    Args:
        model: The model, usually created within `init_empty_weights`. It is changed in place.
        checkpoint: Path or object store URL of a Treadle checkpoint, a safetensors file, a ``torch.save`` file, or a
            folder with a weights file or index (``.index.json``). A local index can also be passed.
        device_map: Devices by module or tensor name, or the method that chooses them: ``"auto"``, ``"balanced"``,
            ``"balanced_low_0"`` (spares the first accelerator) or ``"sequential"``. Default: None (no dispatch).
        max_memory: See `get_max_memory`; used if ``device_map`` is a string.
        no_split_module_classes: See `infer_auto_device_map`; used if ``device_map`` is a string.
        offload_folder: Ignored, because weights on disk are read from the checkpoint each time their module runs.
        offload_buffers: Offload buffers of offloaded modules too.
        dtype: The dtype of floating point weights after loading. Default: their dtype in the model.
        offload_state_dict: Ignored, because the checkpoint is loaded tensor by tensor.
        skip_keys: See `dispatch_model`.
        preload_module_classes: See `dispatch_model`.
        force_hooks: See `dispatch_model`.
        strict: Require matching tensor names. If False, only the model's tensors on the meta device are required.
        full_state_dict: Must be True, because each process reads the whole checkpoint.
        broadcast_from_rank0: Must be False, for the same reason.
        quantization: ``"int8"``, ``"int4"`` or a `WeightQuantizer` for linear layers not on disk. Default: None.

    Returns:
        The model. If ``device_map`` is set, the model has the resulting map as its ``hf_device_map``.

    Raises:
        ValueError, TypeError, OSError: If an argument is invalid, or the checkpoint cannot be loaded into the model.
    """
    _refuse_sharded(full_state_dict, broadcast_from_rank0)
    refuse_twice(model)
    weights = open_weights(checkpoint)
    quantizer = WeightQuantizer.parse(quantization)
    if isinstance(device_map, str):
        device_map = _plan_device_map(
            model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers, quantizer
        )
    load_weights(model, weights, device_map, parse_dtype(dtype), offload_buffers, strict, quantizer=quantizer)
    if device_map is None:
        return model
    on_disk = {name: piece for name, piece in weights.items() if look_up_device(device_map, name) == "disk"}
    main = resolve_main_device(device_map)
    return dispatch(model, device_map, main, on_disk, offload_buffers, skip_keys, preload_module_classes, force_hooks)


def _plan_device_map(
    model: nn.Module,
    method: str,
    max_memory: Mapping[Device, int | str] | None,
    no_split: list[str] | None,
    dtype: torch.dtype | str | None,
    offload_buffers: bool,
    quantizer: WeightQuantizer | None,
) -> dict[str, Device]:
    choose("device_map", method, ("auto", "balanced", "balanced_low_0", "sequential"))
    # Four-bit weights are also planned as one byte, because they have more scales.
    sizes = None if quantizer is None else {f"{name}.weight": torch.int8 for name in quantizer.select(model)}
    limits = max_memory
    if method != "sequential":
        limits = get_balanced_memory(model, max_memory, no_split, dtype, sizes, low_zero=method == "balanced_low_0")
    device_map = infer_auto_device_map(model, limits, no_split, dtype, sizes, offload_buffers=offload_buffers)
    announce(device_map_plan(model, device_map, max_memory, dtype, sizes))
    return device_map


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: Checkpoint,
    device_map: Mapping[str, Device] | None = None,
    offload_folder: Checkpoint | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: str | list[str] | None = None,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint into a model without adding hooks.

    Weights of the checkpoint that the map places on disk are not loaded, and are on the meta device afterwards. To use
    them, pass the checkpoint to `dispatch_model` as ``offload_dir``.

    Args:
        model: The model, which is changed in place.
        checkpoint: See `load_checkpoint_and_dispatch`.
        device_map: Devices by module or tensor name. Default: None, which moves tensors on the meta device to the CPU
            and keeps the devices of all other tensors.
        offload_folder: Ignored.
        dtype: The dtype of floating point weights after loading. Default: their dtype in the model.
        offload_state_dict: Ignored.
        offload_buffers: Leave buffers on disk too, if the map places them there.
        keep_in_fp32_modules: Components of dotted tensor names, such as ``"norm"``. Floating point weights whose names
            contain one of them become float32 instead of ``dtype``. Has no effect if ``dtype`` is None.
        strict: See `load_checkpoint_and_dispatch`.
        full_state_dict: Must be True.
        broadcast_from_rank0: Must be False.

    Raises:
        ValueError, TypeError, OSError: If an argument is invalid, or the checkpoint cannot be loaded into the model.
    """
    _refuse_sharded(full_state_dict, broadcast_from_rank0)
    refuse_twice(model)
    weights = open_weights(checkpoint)
    fp32_parts = {keep_in_fp32_modules} if isinstance(keep_in_fp32_modules, str) else set(keep_in_fp32_modules or ())
    load_weights(model, weights, device_map, parse_dtype(dtype), offload_buffers, strict, fp32_parts)


def load_weights(
    model: nn.Module,
    weights: Weights,
    device_map: Mapping[str, Device] | None,
    dtype: torch.dtype | None,
    offload_buffers: bool,
    strict: bool,
    in_fp32: set[str] = frozenset(),  # type: ignore[assignment]
    quantizer: WeightQuantizer | None = None,
) -> None:
    """Load an open checkpoint into a model. Names and shapes are checked before the model is changed.

    ``in_fp32`` holds components of dotted names; see ``keep_in_fp32_modules`` of `load_checkpoint_in_model`.
    ``quantizer`` rounds the weights of linear layers when they are loaded, except those on disk.
    """
    if device_map is not None:
        check_device_map(model, device_map)
    tensors = named_tensors(model)
    _check_names(model, tensors, weights, strict)
    check_shapes(tensors, weights)
    weights = share_tied_values(tensors, weights)
    rounded = {} if quantizer is None else {f"{name}.weight": part for name, part in quantizer.select(model).items()}
    for names in group_tied_names(tensors):
        old = tensors[names[0]]
        place = None if device_map is None else look_up_device(device_map, names[0])
        device = old.device if place is None else torch.device("cpu") if place == "disk" else resolve(place)
        if device.type == "meta" and place is None:
            device = torch.device("cpu")
        if place == "disk" and (offload_buffers or not is_buffer(old)):
            device = torch.device("meta")
        kind = torch.float32 if in_fp32 & set(names[0].split(".")) and dtype else dtype
        _load_tensor(model, names, old, weights.get(names[0]), device, resolve_stored_dtype(old, kind))
        if quantizer is not None and names[0] in rounded and device.type != "meta":
            quantizer.round(rounded[names[0]])


def _load_tensor(
    model: nn.Module, names: list[str], old: Tensor, piece: Piece | None, device: torch.device, dtype: torch.dtype
) -> None:
    if device.type == "meta" and piece is None and not old.is_meta:
        return  # it is in no checkpoint, so its values stay in memory
    with torch.no_grad():
        if old.device == device and old.dtype == dtype:
            if piece is not None and device.type != "meta":
                piece.fill(old.detach())
            return
        values = torch.empty(old.shape, device=device, dtype=dtype)  # empty_like on meta imports 500 modules, 35 MB
        if piece is not None and device.type != "meta":
            piece.fill(values)
        elif piece is None:
            values.copy_(old)
    set_tensor_by_names(model, names, copy_attributes(old, values))


def _check_names(model: nn.Module, tensors: Mapping[str, Tensor], weights: Weights, strict: bool) -> None:
    unsaved = find_unsaved_names(model)
    unknown = [name for name in weights if name not in tensors and not name.endswith("_extra_state")]
    groups = [names for names in group_tied_names(tensors) if not any(name in weights for name in names)]
    missing = [names[0] for names in groups if not unsaved.issuperset(names)]
    empty = [names[0] for names in groups if tensors[names[0]].is_meta]
    differences = [f"has tensors that the model does not have ({abbreviate(unknown)})"] if unknown else []
    differences += [f"lacks tensors of the model ({abbreviate(missing)})"] if missing else []
    if strict and differences:
        raise ValueError(f"the checkpoint {' and '.join(differences)}. To load what fits, pass strict=False.")
    if empty:
        more = f" The checkpoint has tensors that the model does not have: {abbreviate(unknown)}." if unknown else ""
        raise ValueError(
            f"neither the checkpoint nor the model has values for {abbreviate(empty)}.{more} Load a checkpoint of this "
            "model."
        )
    if differences:
        warn(
            f"the checkpoint {' and '.join(differences)}. Only the tensors that both have are loaded. Set strict=True "
            "to raise an error instead."
        )


def _refuse_sharded(full_state_dict: Any, broadcast_from_rank0: Any) -> None:
    if not full_state_dict or broadcast_from_rank0:
        name = "broadcast_from_rank0=True" if broadcast_from_rank0 else "full_state_dict=False"
        raise ValueError(f"{name} is not supported, because each process loads the full model. Remove the argument.")
