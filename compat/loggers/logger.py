"""The base of all loggers, one that keeps nothing, and the merging of several dicts of metrics."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...loggers import Logger
from ...loggers.logger import rank_zero_experiment
from ...trainer.logging import SilentLogger as DummyLogger

__all__ = ["DummyLogger", "Logger", "merge_dicts", "rank_zero_experiment"]


def merge_dicts(
    dicts: Sequence[Mapping[str, Any]],
    agg_key_funcs: Mapping[str, Any] | None = None,
    default_func: Callable[[Sequence[float]], float] = statistics.mean,
) -> dict[str, Any]:
    """Return one dict with all keys of several, and for each key one value made of theirs.

    Args:
        dicts: the dicts, nested or not; a key may be missing in some, or be None.
        agg_key_funcs: by key, the function of the list of its values; for a nested dict, such a dict.
        default_func: the function of other keys.
    """
    functions = agg_key_funcs or {}
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for part in dicts for key in part):
        values = [part[key] for part in dicts if part.get(key) is not None]
        if values and isinstance(values[0], Mapping):
            merged[key] = merge_dicts(values, functions.get(key), default_func)
        else:
            merged[key] = (functions.get(key) or default_func)(values)
    return merged
