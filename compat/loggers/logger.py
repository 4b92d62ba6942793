"""Base class of loggers, and Lightning's helpers for loggers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...loggers import Logger
from ...loggers.logger import NullExperiment as DummyExperiment
from ...loggers.logger import rank_zero_experiment
from ...trainer.logging import SilentLogger as DummyLogger

__all__ = ["DummyExperiment", "DummyLogger", "Logger", "merge_dicts", "rank_zero_experiment"]


def merge_dicts(
    dicts: Sequence[Mapping[str, Any]],
    agg_key_funcs: Mapping[str, Any] | None = None,
    default_func: Callable[[Sequence[float]], float] = statistics.mean,
) -> dict[str, Any]:
    """Return one dict with all keys of several dicts, which may be nested, aggregating the values of each key.

    Args:
        dicts: The dicts. In some of them, a key may be missing or its value may be None.
        agg_key_funcs: Functions that aggregate a list of values, by key. For a nested dict, a dict of such functions.
            Default: none.
        default_func: Function for all other keys. Default: the mean.
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
