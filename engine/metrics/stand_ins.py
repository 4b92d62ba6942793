"""Exclusion of other ranks' samples from values that a task collects in its own attributes."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_MOST = 256  # a longer list or dict is not searched for nested lists: it holds values
_UNTOUCHED = frozenset({*vars(nn.Module()), "training"}) - {"_buffers"}
_NUMBERS = (int, float, complex, str, type(None))


@contextmanager
def preserve_values(owner: nn.Module) -> Iterator[None]:
    """Return a context that restores the values of a module's own attributes when it ends.

    In an evaluation, a rank may process a sample of another rank, so that the collectives of all ranks match. Values
    that the task collects in its attributes must not include this sample. Numbers, strings, tensors, lists, dicts, sets
    and deques are restored.
    """
    attributes = vars(owner)
    before = {name: value for name, value in attributes.items() if name not in _UNTOUCHED and _is_plain(value)}
    restores = [restore for value in before.values() if (restore := _remember(value)) is not None]
    try:
        yield
    finally:
        for restore in restores:
            restore()
        attributes.update(before)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*_NUMBERS, Tensor, list, dict, set, deque))


def _remember(value: Any) -> Callable[[], Any] | None:
    """Return a function that restores the current content of a tensor or collection; None for any other value."""
    if isinstance(value, nn.Parameter):
        return None
    if isinstance(value, Tensor):
        return functools.partial(value.detach().copy_, value.detach().clone())
    if not isinstance(value, (list, dict, set, deque)):
        return None
    items = value.copy()
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    restores = [r for item in inner if (r := _remember(item)) is not None] if len(value) <= _MOST else []

    def restore() -> None:
        value.clear()
        value.extend(items) if isinstance(value, (list, deque)) else value.update(items)
        for restore_item in restores:
            restore_item()

    return restore
