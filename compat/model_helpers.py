"""The peers' helpers for models, their state dicts and their files."""

from __future__ import annotations

import codecs
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..common.messages import warn
from ..engine.process_state import PartialState
from ..engine.weights import save_object
from ..strategies.distributed import split_tied


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return all modules of a model, or pairs of name and module. Each module follows its submodules."""
    waiting, ordered = [("", model)], []
    while waiting:
        name, module = waiting.pop()
        ordered.append((name, module))
        waiting += [(f"{name}.{child}" if name else child, part) for child, part in module.named_children()]
    return [pair if return_fqns else pair[1] for pair in reversed(ordered)]


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict that contains each tensor once, for a safetensors file.

    If a tensor has several names, all but the first are removed, with a warning. Other tensors that share memory with
    an earlier one are copied.
    """
    _, aliases = split_tied({name: value for name, value in state_dict.items() if isinstance(value, Tensor)})
    storages: set[tuple[torch.device, int]] = set()
    cleaned = {name: value for name, value in state_dict.items() if name not in aliases}
    for name, value in cleaned.items():
        if isinstance(value, Tensor):
            storage = (value.device, value.untyped_storage().data_ptr())
            cleaned[name] = value.clone() if storage[1] and storage in storages else value.contiguous()
            storages.add(storage)
    if aliases:
        warn(
            f"tied tensors are kept under one name, so the other names are omitted: {', '.join(aliases)}. Tie the "
            "tensors again after loading."
        )
    return cleaned


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


def materialize_meta_tensors(module: nn.Module, device: Any) -> None:
    """Create a module's tensors of the device ``"meta"`` on another device, and initialize their submodules.

    Raises:
        TypeError: If a submodule with such tensors has no method ``reset_parameters``.
    """
    for name, part in module.named_modules():
        if not any(tensor.is_meta for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))):
            continue
        if not hasattr(part, "reset_parameters"):
            raise TypeError(
                f"{name or 'the module'} ({type(part).__name__}) has no method reset_parameters, so its tensors can't "
                "be initialized. Define it, or build the model on the device."
            )
        part.to_empty(device=device, recurse=False)
        part.reset_parameters()
