"""Functions of ``accelerate.utils.modeling`` for a module's tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.byte_sizes import parse_bytes
from ...common.messages import nearest, warn
from ...engine.big_models import (
    compute_module_sizes,
    copy_attributes,
    find_loading_hooks,
    is_accelerator,
    look_up_device,
    resolve,
    set_tensor,
)
from ...engine.checkpoint.safetensors_file import abbreviate
from ...engine.weights import open_weights
from .offload_files import load_offloaded_weight

Device = int | str | torch.device
TiedParams = dict[int, dict[Any, Tensor]]

_QUANTIZED = ("Int8Params", "FP4Params", "Params4bit")  # bitsandbytes: moving only the parameter loses its statistics


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model is a ``PeftModel``, even inside ``torch.compile`` or a wrapper."""
    while (inner := getattr(model, "_orig_mod", None) or getattr(model, "module", None)) is not None:
        if not isinstance(inner, nn.Module) or _is_peft(model):
            break
        model = inner
    return _is_peft(model)


def _is_peft(model: nn.Module) -> bool:
    # By name, because importing peft takes seconds, even if it is not used.
    kinds = type(model).__mro__
    return any(kind.__name__ == "PeftModel" and kind.__module__.partition(".")[0] == "peft" for kind in kinds)


def convert_file_size_to_int(size: int | str) -> int:
    """Convert a size to bytes.

    Args:
        size: A number of bytes, or text: ``"5MB"`` is 5 * 10**6 bytes, ``"1GiB"`` is 2**30 bytes, and ``"8Gb"``, with a
            lowercase ``b`` for bits, is 10**9 bytes.

    Raises:
        ValueError: If the size is invalid.
    """
    count = parse_bytes(size, lowercase_b=True)  # which Accelerate reads as bits, except in KiB, MiB and so on
    unit = size.strip()[-2:] if isinstance(size, str) else ""
    return count // 8 if unit.endswith("b") and unit not in ("ib", "Ib") else count


def dtype_byte_size(dtype: Any) -> float:
    """Return the bytes per element of a torch dtype or `CustomDtype`: as in Accelerate, 1/8 for ``torch.bool``."""
    if isinstance(dtype, torch.dtype):
        return 1 / 8 if dtype == torch.bool else dtype.itemsize
    custom = {"fp8": 1.0, "int4": 1 / 2, "int2": 1 / 4}
    name = getattr(dtype, "value", dtype)
    if name not in custom:
        raise ValueError(f"dtype={dtype!r} is not a dtype. Use a torch.dtype or a member of CustomDtype.")
    return custom[name]


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of each parameter, then of each buffer unless ``include_buffers`` is False."""
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else ()
        yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in left_out)


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of a module's non-persistent buffers, relative to their submodules unless ``fqns`` is True."""
    modules = module.named_modules() if recurse else [("", module)]
    return {
        f"{path}.{name}" if fqns and path else name
        for path, inner in modules
        for name in inner._non_persistent_buffers_set
    }


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the names of tied parameters, as one sorted list per parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [sorted(names) for names in groups.values() if len(names) > 1]


def retie_parameters(model: nn.Module, tied_params: Iterable[Iterable[str]]) -> None:
    """Tie the parameters of each group of names to the first one that is not on the meta device."""
    for names in tied_params:
        places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
        parameter = next((p for p in (getattr(*place) for place in places) if not p.is_meta), None)
        if parameter is not None:
            for module, name in places:
                set_tensor(module, name, parameter)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether a Hugging Face model ties weights. For any other kind of model, return False."""
    if "PreTrainedModel" not in [kind.__name__ for kind in type(model).__mro__]:
        return False
    config: Any = getattr(model, "config", None)
    decoder = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    has_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    return bool(
        (getattr(decoder, "tie_word_embeddings", False) and has_head() is not None)
        or (getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False))
        or any(hasattr(module, "_tie_weights") for module in model.modules())
    )


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Iterable[str]], device_map: Mapping[str, Device]
) -> None:
    """Warn about each group of tied parameters that a device map assigns to different devices.

    Raises:
        ValueError: If the map has no device for a parameter.
    """
    for names in tied_params:
        devices = {name: look_up_device(device_map, name) for name in names}
        missing = [name for name, device in devices.items() if device is None]
        if missing:
            raise ValueError(
                f"device_map has no device for {missing[0]!r}. Add an entry for it, or an entry '' for all other names."
            )
        if len(set(devices.values())) > 1:
            warn(f"device_map assigns tied parameters to different devices: {devices}. Assign them to the same device.")


def compute_module_total_buffer_size(model: nn.Module, dtype: Any = None, special_dtypes: Any = None) -> int:
    """Return the size of a model's buffers in bytes. The arguments are those of `compute_module_sizes`."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Sequence[str],
) -> tuple[int, list[str]]:
    """Return the size of the largest layer in bytes, and the names of all layers of that size.

    A layer is a tensor, a module without submodules, or a module of a class in ``no_split_module_classes``.
    ``module_sizes`` is the return value of `compute_module_sizes`.
    """
    layers: list[str] = []

    def visit(name: str, module: nn.Module | Tensor) -> None:
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if not children or type(module).__name__ in no_split_module_classes:
            layers.append(name)
            return
        for child_name, child in children:
            visit(f"{name}.{child_name}", child)

    for name, module in modules:
        visit(name, module)
    largest = max((module_sizes[name] for name in layers), default=0)
    return largest, [name for name in layers if module_sizes[name] == largest]


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the size of a model in bytes, and the size and names of its largest layers."""
    sizes = compute_module_sizes(model)
    parts: list[tuple[str, nn.Module | Tensor]] = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]
    whole: Any = getattr(model, "_no_split_modules", None) or []
    return sizes[""], get_max_layer_size(parts, sizes, whole)


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: Any = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: TiedParams | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move one parameter or buffer of a module to a device.

    Args:
        module: The module.
        tensor_name: The tensor's name relative to ``module``.
        device: The target device.
        value: The new values. Default: None, which keeps the current ones.
        dtype: New dtype of a floating-point or complex ``value``. Default: the tensor's dtype.
        fp16_statistics: Must be None.
        tied_params_map: Copies of tied tensors, by the address of their data and then by device. A copy on ``device``
            is reused; a new one is added if the map has its address. Default: none.
        non_blocking: Whether to copy asynchronously, if possible. Default: False.
        clear_cache: Whether to release unused cached memory of the target accelerator. Default: True.

    Raises:
        ValueError: If the tensor does not exist or cannot be moved.
    """
    path, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(path)
    if name not in owner._parameters and name not in owner._buffers:
        names = [*owner._parameters, *owner._buffers]
        raise ValueError(
            f"tensor_name={tensor_name!r}: {type(owner).__name__} has no parameter or buffer {name!r}."
            f"{nearest(name, names)}"
        )
    old: Tensor = getattr(owner, name)
    if type(old).__name__ in _QUANTIZED or fp16_statistics is not None:
        value_text = f"tensor_name={tensor_name!r} is" if fp16_statistics is None else "fp16_statistics is for"
        raise ValueError(
            f"{value_text} a bitsandbytes weight, which can only be moved with its module. Use module.to(device)."
        )
    target = _as_torch_device(device)
    ties = _find_ties(tied_params_map, value, old)
    shared = next((tie[device] for tie in ties if device in tie), None)
    if shared is not None:
        set_tensor(owner, name, shared)
        return
    new = _convert(tensor_name, old, value, target, dtype, non_blocking)
    stays = value is None and new.dtype == old.dtype and new.device == old.device
    if stays and isinstance(old, nn.Parameter):
        new = old
    if new is not old:
        with torch.no_grad():
            new = copy_attributes(old, new.detach())
        set_tensor(owner, name, new)
    if clear_cache and target.type not in ("cpu", "meta"):
        torch.get_device_module(target.type).empty_cache()
    if ties:
        ties[0][device] = new


def _as_torch_device(device: Device) -> torch.device:
    return resolve(device) if is_accelerator(device) else torch.device(device)


def _find_ties(tied_params_map: TiedParams | None, value: Any, old: Tensor) -> list[dict[Any, Tensor]]:
    if tied_params_map is None:
        return []
    addresses = [tensor.data_ptr() for tensor in (value, old) if isinstance(tensor, Tensor)]
    return [tied_params_map[address] for address in addresses if address in tied_params_map]


def _convert(
    name: str, old: Tensor, value: Any, target: torch.device, dtype: str | torch.dtype | None, non_blocking: bool
) -> Tensor:
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."))
    assert not isinstance(dtype, str)
    if value is None:
        if old.is_meta and target.type != "meta":
            raise ValueError(
                f"{name!r} is on the meta device, so it has no values to move to {target}. Load its values first, or "
                "pass value=... to set_module_tensor_to_device."
            )
        new_dtype = dtype if target.type == "meta" and old.is_floating_point() else None
        return old.detach().to(device=target, dtype=new_dtype or old.dtype, non_blocking=non_blocking)
    value = torch.as_tensor(value)
    if value.shape != old.shape:
        raise ValueError(
            f"the value has shape {list(value.shape)}, but {name!r} has shape {list(old.shape)}. Pass a value of the "
            "same shape."
        )
    new_dtype = old.dtype if dtype is None else dtype if value.is_floating_point() else value.dtype
    return value.to(device=target, dtype=new_dtype, non_blocking=non_blocking)


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether weights of a module are offloaded until the module is called."""
    return _get_offload_hook(module) is not None or find_loading_hooks(module) is not None


def _get_offload_hook(module: nn.Module) -> Any:
    hook: Any = getattr(module, "_hf_hook", None)
    return hook if getattr(hook, "offload", None) is True else None  # in other classes `offload` may be a method


@contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Move a module's tensors to a device within a ``with`` block, then move them back or offload them again.

    If the module has offloaded tensors, these are moved, by default to the device on which the module runs. Otherwise,
    its direct parameters are moved if ``execution_device`` is set.
    """
    hook = _get_offload_hook(module)
    if hook is not None:
        before = hook.execution_device
        hook.execution_device = before if execution_device is None else execution_device
        try:
            hook.pre_forward(module)
            yield
        finally:
            hook.post_forward(module, None)
            hook.execution_device = before
    elif hooks := find_loading_hooks(module):
        with hooks.loaded(None if execution_device is None else _as_torch_device(execution_device)):
            yield
    elif execution_device is None:
        yield
    else:
        parameters = dict(module.named_parameters(recurse=False))
        try:
            for name in parameters:
                set_module_tensor_to_device(module, name, execution_device)
            yield
        finally:
            for name, parameter in parameters.items():
                set_module_tensor_to_device(module, name, parameter.device)


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's state dict on the CPU, including offloaded weights. Omit tensors without values, and warn."""
    state: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if path and not has_offloaded_params(module):
            continue  # the root's own state contains it
        with align_module_device(module, "cpu") if has_offloaded_params(module) else align_module_device(module):
            for key, tensor in module.state_dict().items():
                if not tensor.is_meta:
                    state[f"{path}.{key}" if path else key] = tensor.to("cpu")
    names = list(model.state_dict())
    if missing := [name for name in names if name not in state]:
        warn(
            f"the state dict omits tensors on the meta device, which have no values: {abbreviate(missing)}. Load the "
            "model's weights first."
        )
    return {name: state[name] for name in names if name in state}


def get_state_dict_from_offload(
    module: nn.Module, module_name: str, state_dict: dict[str, Any], device_to_put_offload: Device = "cpu"
) -> dict[str, Any]:
    """Replace a module's entries in a state dict with the module's current tensors, and return the state dict.

    ``module_name`` is the full name of any of its tensors, such as ``"encoder.weight"`` for the module ``encoder``.
    """
    prefix = module_name[: module_name.rfind(".") + 1]
    with align_module_device(module, device_to_put_offload if has_offloaded_params(module) else None):
        for key, tensor in module.state_dict().items():
            if prefix + key in state_dict:
                state_dict[prefix + key] = tensor
    return state_dict


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Device] | None = None
) -> dict[str, Tensor]:
    """Load the tensors of a checkpoint without executing any code in it.

    Args:
        checkpoint_file: A safetensors file, a ``torch.save`` file with a state dict, an index, a folder of these, a
            Treadle checkpoint, or a URL of one of these; for an index, the URL of its folder.
        device_map: Devices by name of module or tensor. Other tensors, and those mapped to ``"disk"``, are loaded to
            the CPU. Default: None.

    Raises:
        ValueError: If the checkpoint is missing, damaged or not supported, or a device is invalid.
    """
    tensors: dict[str, Tensor] = {}
    for name, piece in open_weights(checkpoint_file).items():
        device = look_up_device(device_map, name) if device_map else None
        values = torch.empty(piece.shape, dtype=piece.dtype)
        piece.fill(values)
        tensors[name] = values if device in (None, "disk") else values.to(_as_torch_device(device))
    return tensors


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Load the weights that the index of an offload folder lists into a model on the CPU."""
    for name, info in (index or {}).items():
        weight = load_offloaded_weight(Path(offload_folder) / f"{name}.dat", info)
        set_module_tensor_to_device(model, name, "cpu", value=weight)
