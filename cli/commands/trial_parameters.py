"""Formatting of a trial's parameters as text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any


def shorten_keys(keys: Iterable[str]) -> dict[str, str]:
    """Map each dotted key to its last part, such as ``lr`` for ``model.lr``, or to itself if the part is ambiguous."""
    ends = {key: key.rpartition(".")[2] for key in keys}
    return {key: end if list(ends.values()).count(end) == 1 else key for key, end in ends.items()}


def format_parameters(parameters: Mapping[str, Any]) -> str:
    """Return the parameters of a trial as one line, such as ``lr=0.003 batch_size=64``."""
    names = shorten_keys(parameters)
    return " ".join(f"{names[key]}={format_parameter(value)}" for key, value in parameters.items())


def format_parameter(value: Any) -> str:
    """Return a stored value as text: floats with at most four significant digits, objects with their class name."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if not isinstance(value, str):
        return json.dumps(value)
    if value.startswith('{"class": "'):
        with contextlib.suppress(ValueError):
            arguments = json.loads(value)
            name = arguments.pop("class").rpartition(".")[2]
            return f"{name}({', '.join(f'{key}={format_parameter(item)}' for key, item in arguments.items())})"
    return value
