"""Parameter names: without what compilation adds, tied parameters once, views told apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..strategies.distributed import local

_COMPILED = "_orig_mod."


def own_name(name: str) -> str:
    """A parameter's name without what ``torch.compile`` puts into it."""
    return name.replace(_COMPILED, "")


def untied(weights: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, each once, and which name stands for which of the others."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in weights.items():
        kept = first.setdefault(view_key(tensor), name)
        if kept == name:
            tensors[name] = tensor
        else:
            aliases[name] = kept
    return tensors, aliases


def view_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors have in common exactly when they are the same view of the same memory, as tied weights are.

    Args:
        tensor: Any strided tensor that has memory. The key is valid only while the tensor lives.

    Returns:
        A value to compare or to use in a dict.
    """
    held = local(tensor)
    pointer = held.untyped_storage().data_ptr()
    if pointer == 0:  # nothing allocated, so nothing shared
        return (id(tensor),)
    view = (held.storage_offset(), held.shape, held.stride(), held.dtype, held.is_conj(), held.is_neg(), tensor.shape)
    return (held.device, pointer, *view)
