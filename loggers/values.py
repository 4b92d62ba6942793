"""Conversion of logged values and hyperparameters to plain data."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import numbers
import operator
from collections.abc import Iterator, Mapping, MutableSequence, Set
from enum import Enum
from typing import Any

from ..common.messages import name_type


def as_number(name: str, value: Any) -> float:
    """Return a metric's value as a plain number.

    Args:
        name: Name of the metric, for messages.
        value: A real number, or a tensor or array with one element.

    Raises:
        TypeError, ValueError: If the value is not one real number.
    """
    number = value
    if callable(getattr(value, "item", None)):  # a tensor, an array or a numpy number
        try:
            number = value.item()
        except (RuntimeError, ValueError):
            raise ValueError(
                f"metric {name!r} has shape {tuple(value.shape)}, but must be one number. Reduce it first, for "
                "example with .mean()."
            ) from None
    if isinstance(number, numbers.Real):
        return int(number) if isinstance(number, numbers.Integral) else float(number)
    raise TypeError(
        f"metric {name!r} is {value!r}, but must be one number, not {name_type(value)}. Pass a number or a tensor with "
        "one element."
    )


def as_metrics(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float | dict[str, float]]:
    """Return metrics as plain numbers under their full names. Nested mappings become dicts.

    Args:
        metrics: Values by name.
        prefix: Text before every name. Default: none.

    Raises:
        TypeError, ValueError: If a name or a value is invalid.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics={metrics!r} must be a dict of numbers by name, not {name_type(metrics)}.")
    result: dict[str, float | dict[str, float]] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"metric name {name!r} must be a non-empty string, such as 'loss'.")
        if isinstance(value, Mapping):
            result[prefix + name] = {str(key): as_number(f"{name}/{key}", inner) for key, inner in value.items()}
        else:
            result[prefix + name] = as_number(name, value)
    return result


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each entry. Nested names are joined by ``/``.

    Args:
        values: Values by name; non-empty dicts among them are flattened too.
        prefix: Text before every name. Default: none.
    """
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value


def as_mapping(params: Any) -> Mapping[str, Any]:
    """Return hyperparameters as a mapping, which is empty for None.

    Args:
        params: A mapping, an ``argparse.Namespace``, a dataclass instance or None.

    Raises:
        TypeError: If ``params`` has another type.
    """
    if params is None:
        return {}
    if isinstance(params, Mapping):
        return params
    if isinstance(params, argparse.Namespace):
        return vars(params)
    if dataclasses.is_dataclass(params) and not isinstance(params, type):
        return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    raise TypeError(
        f"params={params!r} must be a dict, a namespace or a dataclass, not {name_type(params)}. "
        "Pass {'name': value}."
    )


def plain(value: Any) -> Any:
    """Convert a value to plain data: dicts, lists, str, int, float, bool and None.

    An object that cannot be converted is replaced by its ``str``.

    Args:
        value: Any value. Mappings, namespaces and dataclass instances become dicts; lists, tuples and sets become
            lists; a tensor or array with one real element becomes a number.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping | argparse.Namespace) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        return {str(key): plain(inner) for key, inner in as_mapping(value).items()}
    if isinstance(value, MutableSequence | tuple | Set):  # a list of OmegaConf is a MutableSequence, but not a list
        return [plain(inner) for inner in value]
    if not isinstance(value, Enum):
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
            number = value.item()  # a tensor with one element or a numpy number, whose type YAML does not support
            if type(number) in (int, float, bool):
                return number
    return str(value)


def check_step(step: Any) -> int:
    """Return a step as an integer.

    Args:
        step: An integer of at least 0, which may be a NumPy integer or a tensor.

    Raises:
        TypeError, ValueError: If the step is invalid.
    """
    try:
        step = operator.index(step)
    except TypeError:
        raise TypeError(f"step={step!r} must be an integer. Pass int(step).") from None
    if step < 0:
        raise ValueError(f"step={step} must be at least 0.")
    return int(step)
