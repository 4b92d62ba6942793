"""Check whether a stream may be read ahead of the loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from ..sampler_rng import get_stateful
from ..source_libraries import copies_state

# For example the network of an agent of a source of experience of a dataset; a pipeline's list is a level too.
_LEVELS = 5
_OBJECTS = 1000
_ITEMS = 100  # a longer list is treated as data


def may_read_ahead(source: DataLoader[Any], state_owner: Any) -> bool:
    """Return whether a stream may be read ahead of the loop.

    A stream that is read in this process may not be read ahead if its samples could depend on the model being trained.
    The same holds for a stream whose ``state_dict`` could be too expensive to call before each batch, or could return
    an object that changes later.
    """
    owners = [state_owner]
    if source.num_workers == 0:
        if holds_model(source.dataset):
            return False
        owners.append(get_stateful(source.dataset))  # a loader with a state asks the dataset for its state
    return all(owner is None or copies_state(owner) for owner in owners)


def holds_model(dataset: Any) -> bool:
    """Return whether a dataset refers to an ``nn.Module``, directly or through nested objects and functions.

    References are followed only to a limited depth and number.
    """
    visited, level = set[int](), [dataset, getattr(type(dataset), "__iter__", None)]
    for _ in range(_LEVELS):
        following: list[Any] = []
        for value in level:
            if isinstance(value, nn.Module):
                return True
            if id(value) not in visited and len(visited) < _OBJECTS:
                visited.add(id(value))
                following += _iter_held(value)
        level = following
    return any(isinstance(value, nn.Module) for value in level)


def _iter_held(value: Any) -> Iterator[Any]:
    if isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, partial):
        yield value.func
        yield from value.args
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # it is not filled yet
                yield cell.cell_contents
        yield from (value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__)
    elif isinstance(value, list | tuple | dict):
        if len(value) <= _ITEMS:
            yield from value.values() if isinstance(value, dict) else value
    elif not isinstance(value, type | ModuleType):
        yield from getattr(value, "__dict__", {}).values()
