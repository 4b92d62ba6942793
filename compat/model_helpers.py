"""Accelerate's helpers for models, their state dicts and their files."""

from __future__ import annotations

import codecs
import copy
import io
import pickle
import re
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..common.messages import warn
from ..engine.nested import honor_type, is_compiled_module
from ..engine.process_state import PartialState
from ..engine.weights import save_object


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether a model is, or contains, a module that ``torch.compile`` returned."""
    return any(is_compiled_module(part) for part in module.modules()) and bool(module._modules)


def is_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module is a non-empty ``ModuleList`` whose items are all instances of the first item's class."""
    return isinstance(module, nn.ModuleList) and len(module) > 0 and all(isinstance(m, type(module[0])) for m in module)


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return whether a module is, or contains, a list of blocks for which `is_repeated_blocks` is True."""
    return any(is_repeated_blocks(part) for part in module.modules())


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return a copy of the model that shares its parameters and has each repeated block compiled separately.

    The repeated blocks are the items of lists for which `is_repeated_blocks` is True. Each remaining submodule is
    compiled as a whole. Blocks of one class can share compiled code; see torch's tutorial on regional compilation.

    Args:
        module: The model. Without repeated blocks, it is compiled as a whole.
        **compile_kwargs: Arguments of ``torch.compile``.
    """
    compiled = _compile_parts(module, compile_kwargs)
    compiled.__dict__.setdefault("_orig_mod", module)  # in __dict__, so that it is not registered as a second child
    return compiled


def _compile_parts(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    if is_repeated_blocks(module):
        return nn.ModuleList(torch.compile(block, **options) for block in module)  # type: ignore[misc, attr-defined]
    if not has_repeated_blocks(module):
        return torch.compile(module, **options)  # type: ignore[return-value]
    compiled = module.__class__.__new__(module.__class__)
    compiled.__dict__.update(module.__dict__)
    for name, value in module.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is module:
            compiled.__dict__[name] = MethodType(value.__func__, compiled)
    compiled._modules = {}
    for name, child in module.named_children():
        compiled.add_module(name, _compile_parts(child, options))
    return compiled


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile each repeated block and the modules without such blocks in place, and return the model."""
    if is_repeated_blocks(module):
        for block in module.children():
            block.compile(**compile_kwargs)
    elif has_repeated_blocks(module):
        for child in module.children():
            compile_regions_fsdp2(child, **compile_kwargs)
    else:
        module.compile(**compile_kwargs)
    return module


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return all modules of a model, or pairs of name and module. Each module follows its submodules."""
    waiting, ordered = [("", model)], []
    while waiting:
        name, module = waiting.pop()
        ordered.append((name, module))
        waiting += [(f"{name}.{child}" if name else child, part) for child, part in module.named_children()]
    return [pair if return_fqns else pair[1] for pair in reversed(ordered)]


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of the first module whose class has this name, or None."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether any parameter is a ``DTensor``."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return the number of ranks over which Transformers has split the model's matrices, or None."""
    size = getattr(model, "tp_size", None)
    if size is not None:
        return int(size)
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    return config.get("tp_size") if isinstance(config, dict) else getattr(config, "tp_size", None)


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict that contains each tensor once, for a safetensors file.

    If a tensor has several names, all but the first are removed, with a warning. Other tensors that share memory with
    an earlier one are copied.
    """
    names: dict[Any, str] = {}
    storages: set[tuple[torch.device, int]] = set()
    cleaned, removed = {}, []
    for name, value in state_dict.items():
        if not isinstance(value, Tensor):
            cleaned[name] = value
            continue
        storage = (value.device, value.untyped_storage().data_ptr())
        view = (*storage, value.storage_offset(), value.shape, value.stride(), value.dtype)
        if storage[1] and names.setdefault(view, name) != name:
            removed.append(name)
            continue
        shares_memory = bool(storage[1]) and storage in storages
        storages.add(storage)
        cleaned[name] = value.clone() if shares_memory else value.contiguous()
    if removed:
        warn(
            f"tied tensors are kept under one name, so the other names are omitted: {', '.join(removed)}. Tie the "
            "tensors again after loading."
        )
    return cleaned


def move_to_device(state: Any, device: Any) -> Any:
    """Return nested lists, tuples and dicts, such as an optimizer's state, with every tensor on ``device``."""
    if isinstance(state, list | tuple):
        return honor_type(state, (move_to_device(item, device) for item in state))
    if isinstance(state, dict):
        moved = copy.copy(state)  # an optimizer's state is a defaultdict
        moved.update({key: move_to_device(item, device) for key, item in state.items()})
        return moved
    return state.to(device) if isinstance(state, Tensor) else state


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write an object with ``torch.save``, or a dict of tensors with safetensors, on rank zero.

    With ``save_on_each_node``, local rank zero of every machine writes.
    """
    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        if safe_serialization:
            save_object(clean_state_dict_for_safetensors(obj), f, safe=True)
        else:
            torch.save(obj, f)  # also writes numpy arrays, which `load` reads


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Load a ``torch.save`` file. By default, only tensors, NumPy arrays and plain values are unpickled."""
    core = np._core.multiarray  # type: ignore[attr-defined]
    safe = [core._reconstruct, core.scalar, np.ndarray, np.dtype, codecs.encode, *_NUMPY_TYPES]
    with torch.serialization.safe_globals(safe):
        return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


_NUMPY_TYPES = [kind for kind in vars(np.dtypes).values() if isinstance(kind, type)]


def save_custom_state(obj: Any, path: str, index: int = 0, save_on_each_node: bool = False) -> None:
    """Write ``obj.state_dict()`` to ``path/custom_checkpoint_{index}.pkl`` on rank zero.

    With ``save_on_each_node``, local rank zero of every machine writes.

    Raises:
        TypeError: If the state contains values that `load_custom_state` could not load. No file is written.
    """
    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        buffer = io.BytesIO()
        torch.save(obj.state_dict(), buffer)
        buffer.seek(0)
        try:
            load(buffer)
        except pickle.UnpicklingError as error:
            unsafe = re.search(r"GLOBAL (\S+)", str(error))
            value = f"a value of type {unsafe[1]}" if unsafe else "a value"
            raise TypeError(
                f"{type(obj).__name__}.state_dict() contains {value} that can't be loaded without running code. Return "
                "only numbers, strings, tensors, NumPy arrays, lists and dicts."
            ) from error
        (Path(path) / f"custom_checkpoint_{index}.pkl").write_bytes(buffer.getvalue())


def load_custom_state(obj: Any, path: str, index: int = 0) -> None:
    """Load the state that `save_custom_state` wrote. Only tensors, NumPy arrays and plain values are unpickled."""
    obj.load_state_dict(load(Path(path) / f"custom_checkpoint_{index}.pkl", map_location="cpu"))
