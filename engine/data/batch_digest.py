"""Digests of batches, to compare batches between ranks and between runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from ...common.tensor_bytes import view_bytes


def digest(value: Any) -> str:
    """Return a hexadecimal 128-bit digest of the contents of ``value``, such as a batch."""
    hasher = xxhash.xxh3_128()
    _feed(hasher.update, value, set())
    return hasher.hexdigest()


def _feed(update: Callable[[Any], None], value: Any, above: set[int]) -> None:
    update(type(value).__name__.encode())
    if value is None or isinstance(value, bool | int | float | complex | str | np.generic):
        update(repr(value).encode())
    elif isinstance(value, bytes | bytearray | memoryview):
        update(value)
    elif isinstance(value, Tensor):
        _feed_tensor(update, value)
    elif isinstance(value, np.ndarray):
        update(f"{value.dtype} {value.shape}".encode())
        update(repr(value.tolist()).encode() if value.dtype.hasobject else np.ascontiguousarray(value).tobytes())
    elif id(value) not in above:  # otherwise it contains itself
        above = above | {id(value)}
        if isinstance(value, Mapping):
            for key, item in value.items():
                _feed(update, key, above)
                _feed(update, item, above)
        elif isinstance(value, Set):
            for text in sorted(map(repr, value)):
                update(text.encode())
        elif isinstance(value, Sequence):
            for item in value:
                _feed(update, item, above)
        elif callable(to_bytes := getattr(value, "tobytes", None)):  # images and arrays of other libraries
            update(to_bytes())
        elif callable(to_numpy := getattr(value, "to_numpy", None)):  # data frames
            _feed(update, to_numpy(), above)
        else:
            for name, item in sorted(getattr(value, "__dict__", {}).items()):
                update(name.encode())
                _feed(update, item, above)


def _feed_tensor(update: Callable[[Any], None], tensor: Tensor) -> None:
    is_subclass = type(tensor) not in (Tensor, torch.nn.Parameter)
    # The subclass may have methods of its own.
    if is_subclass and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
        tensor = torch.Tensor.as_subclass(tensor, Tensor)
    update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.layout is not torch.strided or tensor.is_quantized:
        update(repr(tensor).encode())
    elif not tensor.is_meta:
        update(view_bytes(tensor.detach().cpu().contiguous()).numpy())
