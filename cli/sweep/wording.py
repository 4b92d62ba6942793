"""How the parameters of a trial are written for people. Nothing here waits for torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any


def shorten_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return each dotted key as short as tells it from the others: ``lr`` for ``model.lr``."""
    ends = {key: key.rpartition(".")[2] for key in keys}
    return {key: end if list(ends.values()).count(end) == 1 else key for key, end in ends.items()}


def format_parameters(parameters: Mapping[str, Any]) -> str:
    """Return the parameters of a trial on one line: ``lr=0.003 batch_size=64``."""
    names = shorten_keys(parameters)
    return " ".join(f"{names[key]}={format_parameter(value)}" for key, value in parameters.items())


def format_parameter(value: Any) -> str:
    """Return a value with four digits at most, or as YAML writes it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
