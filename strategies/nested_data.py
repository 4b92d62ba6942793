"""Functions applied to the tensors in nested data, such as a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class _Dataclass(Protocol):
    __dataclass_fields__: dict[str, Any]


def apply_nested(data: Any, kind: Any, function: Callable[[Any], Any]) -> Any:
    """Return ``data`` with ``function`` applied to each object of a type, in mappings, sequences and dataclasses.

    Unlike ``lightning_utilities.apply_to_collection``, frozen dataclasses are supported (Lightning #21577).

    Args:
        data: The nested data, which is not changed.
        kind: The type, or a tuple of types.
        function: Function of one object.
    """
    from lightning_utilities.core.apply_func import apply_to_collection  # here, as the package takes time to import

    def visit(value: Any) -> Any:
        return function(value) if isinstance(value, kind) else _visit_dataclass(value, kind, function)

    kinds = kind if isinstance(kind, tuple) else (kind,)
    return apply_to_collection(data, (*kinds, _Dataclass), visit)


def _visit_dataclass(value: Any, kind: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, type):
        return value
    # Not with `dataclasses.replace`, which runs `__post_init__` again and loses attributes that are no fields.
    result = copy.copy(value)
    assign = object.__setattr__ if value.__dataclass_params__.frozen else setattr
    for field in fields(value):
        if field.init:
            assign(result, field.name, apply_nested(getattr(value, field.name), kind, function))
    for base in type(value).__mro__:
        for name, attribute in vars(base).items():
            if isinstance(attribute, cached_property):
                vars(result).pop(name, None)  # it was computed from the previous values
    return result


def iter_tensors(data: Any) -> Iterator[Tensor]:
    """Yield the tensors in mappings, sequences and dataclasses, in the order in which `apply_nested` visits them."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Mapping):
        for item in data.values():
            yield from iter_tensors(item)
    elif isinstance(data, Sequence) and not isinstance(data, str):
        for item in data:
            yield from iter_tensors(item)
    elif hasattr(data, "__dataclass_fields__") and not isinstance(data, type):
        for field in fields(data):
            yield from iter_tensors(getattr(data, field.name, None))
