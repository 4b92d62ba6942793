"""Data as ``torch.load(weights_only=True)`` reads it."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from datetime import date, time, timedelta
from pathlib import PurePath
from typing import Any

import numpy as np

from ..strategies.shards import is_sharded

_ADVICE: dict[type, str] = {
    PurePath: "store str(it)",
    timedelta: "store its .total_seconds()",
    date: "store its .isoformat()",
    time: "store its .isoformat()",
    np.ndarray: "store torch.from_numpy(it), or its .tolist()",
    frozenset: "store a set",
}


def readable(value: Any, place: str) -> Any:
    """What ``torch.load(weights_only=True)`` reads: numpy's numbers become Python's, a defaultdict a plain dict.

    Args:
        value: what `codec.encode` takes. What needs no change stays the same object.
        place: where it is, for the error.

    Raises:
        TypeError: for what it refuses. The text names the place, the type and the fix.
    """
    kind = type(value)
    if isinstance(value, np.generic):
        return value.item()
    if kind in (dict, defaultdict, OrderedDict, Counter):
        pairs = [(readable(key, f"a key of {place}"), readable(one, f"{place}.{key}")) for key, one in value.items()]
        old = [part for pair in value.items() for part in pair]
        return value if kind is not defaultdict and _same(old, [p for pair in pairs for p in pair]) else dict(pairs)
    if kind in (list, tuple, set):
        items = [readable(one, f"{place}.{number}") for number, one in enumerate(value)]
        return value if _same(value, items) else kind(items)
    if is_sharded(value):
        raise TypeError(f"{place}: is one process's part of a tensor; save accelerator.get_state_dict(model).")
    for refused, advice in _ADVICE.items():
        if isinstance(value, refused):
            raise TypeError(
                f"{place}: torch.load(weights_only=True) reads no {kind.__name__}, and what is written here is to be "
                f"read without trust: {advice}, or leave it out."
            )
    return value


def _same(old: Iterable[Any], new: Iterable[Any]) -> bool:
    """Whether nothing was changed: then the container stays the same object, with what a state dict notes of itself."""
    return all(one is other for one, other in zip(old, new, strict=True))
