"""Base of all loggers, a logger that discards values, and merging of dicts of metrics."""

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
    """Merge dicts into one with all keys, aggregating the values of each key.

    Args:
        dicts: The dicts, nested or not. A key may be missing in some, or be None.
        agg_key_funcs: Functions of the list of values by key; for a nested dict, such a dict.
        default_func: The function for other keys.

    Returns:
        The merged dict.
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
