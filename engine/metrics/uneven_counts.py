"""Computation of torchmetrics objects if the ranks have processed different numbers of batches.

torchmetrics gathers a list state tensor by tensor, unless its reduction is ``"cat"``. If such lists have unequal
lengths, ranks hang or mix up items. For a rank without data, torchmetrics sends an empty vector, even if the other
ranks' tensors have more dimensions or another dtype. These problems do not occur if samples are repeated until all
ranks have the same number. Treadle counts each sample once, so some ranks may have no share of the last batches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...strategies import World
from . import metric_state


@contextmanager
def uneven_counts(owner: nn.Module, world: World) -> Iterator[None]:
    """Return a context in which ``compute()`` works even if some ranks have updated a metric more often than others.

    Args:
        owner: The module that contains the torchmetrics objects, usually the task.
        world: The processes that compute the metrics.
    """
    metrics = [] if world.size == 1 else [m for m in metric_state.find(owner).values() if _gathers_lists(m)]
    for metric in metrics:
        metric._sync_dist = functools.partial(_sync_dist, metric, world)
    try:
        yield
    finally:
        for metric in metrics:
            vars(metric).pop("_sync_dist", None)


def _gathers_lists(metric: Any) -> bool:
    if getattr(metric, "process_group", None) is not None:  # the metric is reduced over ranks that the task chooses
        return False
    return hasattr(type(metric), "_sync_dist") and any(isinstance(state, list) for state in metric._defaults.values())


@dataclass(frozen=True)
class _ListState:
    """Length of a list state on one rank, and the row shape and dtype of its first tensor.

    ``row_shape`` is None if the list is empty or its first tensor is 0-d.
    """

    length: int
    row_shape: tuple[int, ...] | None
    dtype: torch.dtype | None

    @classmethod
    def from_items(cls, items: list[Tensor]) -> _ListState:
        if not items:
            return cls(0, None, None)
        first = items[0]
        return cls(len(items), tuple(first.shape[1:]) if first.ndim else None, first.dtype)

    def make_filler(self, device: Any) -> Tensor:
        """Return a tensor without rows, or a 0-d zero, that can be gathered with the tensors of other ranks."""
        shape = () if self.row_shape is None else (0, *self.row_shape)
        return torch.zeros(shape, dtype=self.dtype, device=device)


def _sync_dist(metric: Any, world: World, *args: Any, **kwargs: Any) -> None:
    """Call the metric's own ``_sync_dist`` with lists padded to equal length, and remove the padding afterwards."""
    lists = {name: items for name in metric._defaults if (items := _read_list(metric, name)) is not None}
    every = world.gather_objects({name: _ListState.from_items(items) for name, items in lists.items()})
    filled: dict[str, list[int]] = {}
    for name, items in lists.items():
        states = [part.get(name) for part in every]
        if None in states:
            continue  # some rank's list contains other objects than tensors: the metric gathers it separately
        longest = max(states, key=lambda state: state.length)
        if longest.length and len(items) < longest.length:
            items = items + [longest.make_filler(metric.device)] * (longest.length - len(items))
        setattr(metric, name, items)
        filled[name] = [state.length for state in states]
    type(metric)._sync_dist(metric, *args, **kwargs)
    for name, lengths in filled.items():
        gathered = getattr(metric, name)
        if metric._reductions[name] is None and len(set(lengths)) > 1:  # the first tensor of each rank, the second, ...
            places = ((index, rank) for index in range(max(lengths)) for rank in range(len(lengths)))
            kept = [index < lengths[rank] for index, rank in places]
            setattr(metric, name, [item for item, keep in zip(gathered, kept, strict=True) if keep])


def _read_list(metric: Any, name: str) -> list[Tensor] | None:
    """Return the tensors of a list state, concatenated if the reduction concatenates them; None for other states."""
    items, reduction = getattr(metric, name), metric._reductions[name]
    concatenated = getattr(reduction, "__name__", "") == "dim_zero_cat"
    if not isinstance(metric._defaults[name], list) or not (reduction is None or concatenated):
        return None
    if concatenated and isinstance(items, Tensor):  # concatenated by an earlier compute()
        items = [items]
    if not isinstance(items, list) or not all(isinstance(item, Tensor) for item in items):
        return None
    return [torch.cat([torch.atleast_1d(item) for item in items])] if concatenated and items else items
