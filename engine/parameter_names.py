"""Names of parameters, and memory of tensors: which tensors are tied, and the bytes of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..strategies.distributed import local

_COMPILED = "_orig_mod."


def strip_compile_prefix(name: str) -> str:
    """Return a parameter's name without the prefixes that ``torch.compile`` adds.

    Args:
        name: The name of a parameter or a module.
    """
    return name.replace(_COMPILED, "")


def split_tied(weights: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Separate distinct tensors from the aliases of tied tensors.

    Args:
        weights: Tensors by name.

    Returns:
        Two dicts: each distinct tensor by its first name, and for each further name, the first name of the same tensor.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in weights.items():
        key = make_view_key(tensor) if isinstance(tensor, Tensor) else (id(tensor),)
        first_name = first.setdefault(key, name)
        if first_name == name:
            tensors[name] = tensor
        else:
            aliases[name] = first_name
    return tensors, aliases


def make_view_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two tensors that are the same view of the same memory, as tied weights are.

    The key is valid only while the tensor exists. A tensor without memory, or a wrapper of other tensors, has a unique
    key.
    """
    local_tensor = local(tensor)
    # A tensor that consists of several ones, such as rounded weights and their scales.
    if is_traceable_wrapper_subclass(local_tensor):
        return (id(tensor),)
    pointer = local_tensor.untyped_storage().data_ptr()
    if pointer == 0:  # nothing is allocated, so nothing is shared
        return (id(tensor),)
    view = (
        local_tensor.storage_offset(),
        local_tensor.shape,
        local_tensor.stride(),
        local_tensor.dtype,
        local_tensor.is_conj(),
        local_tensor.is_neg(),
        tensor.shape,
    )
    return (local_tensor.device, pointer, *view)


def view_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor on the CPU as a vector of bytes that shares the memory.

    A tensor of one element is contiguous with any stride. ``reshape(-1)`` would keep this stride, with which the tensor
    may not be viewable as another dtype.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
