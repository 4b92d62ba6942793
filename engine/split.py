"""This process's share of any inputs: contiguous, so that what the processes make of them comes back in order."""

from __future__ import annotations

from collections.abc import Mapping, Set, Sized
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from .exchange import with_items
from .order import share


def split(inputs: Any, rank: int, size: int, apply_padding: bool = False) -> Any:
    """Process ``rank``'s share of ``inputs``, in their own form; the inputs are left as they are.

    Shares are contiguous, in the order of the ranks; their sizes differ by at most one, and where there are fewer
    inputs than processes the last shares are empty. With ``apply_padding`` all shares have the same size: the last
    input is repeated after the end, so that the gathered results' first ``len(inputs)`` are those of the inputs.

    Args:
        inputs: a list, tuple, range, tensor, array, data frame or dataset (of torch, or with ``select``); a dict (or
            named tuple) of these, of one length; or any other iterable, an iterator too, which every process reads to
            its end and whose share is a list.
        rank: this process.
        size: number of processes.
        apply_padding: give every process as many.

    Raises:
        TypeError: for what is no collection (a str, a number), or has no order (a set).
        ValueError: for a dict whose values differ in length.
    """
    count, inputs = _counted(inputs)
    if not apply_padding or not count:
        return _taken(inputs, share(count, rank, size))
    each = -(-count // size)
    return _taken(inputs, [min(i, count - 1) for i in range(rank * each, (rank + 1) * each)])


def _counted(inputs: Any) -> tuple[int, Any]:
    """How many inputs there are, and the inputs in a form that can be cut."""
    if isinstance(inputs, str | bytes | bytearray):
        raise TypeError(
            f"split_between_processes got one {type(inputs).__name__}, {inputs[:40]!r}, which would be cut into its "
            "letters. For several inputs give a list of them; with one there is nothing to split."
        )
    if isinstance(inputs, Set):
        raise TypeError(
            f"split_between_processes got a {type(inputs).__name__}, whose order differs between processes: "
            "give sorted(inputs)."
        )
    if isinstance(inputs, Mapping):
        return _counted_fields(inputs)
    if hasattr(inputs, "_fields"):  # a named tuple
        count, fields = _counted_fields(inputs._asdict())
        return count, type(inputs)(**fields)
    if isinstance(inputs, Tensor | np.ndarray):
        if not inputs.ndim:
            raise TypeError("split_between_processes got a single number (a 0-d tensor): there is nothing to split.")
        return inputs.shape[0], inputs
    if isinstance(inputs, Sized) and (isinstance(inputs, list | tuple | range) or _cut_by_index(inputs)):
        return len(inputs), inputs
    try:
        listed = list(inputs)
    except TypeError as error:
        raise TypeError(
            f"split_between_processes takes collections and iterables, not {type(inputs).__name__} ({error})."
        ) from None
    return len(listed), listed


def _cut_by_index(inputs: Any) -> bool:
    """Data frames, Hugging Face's datasets, and torch's."""
    if hasattr(inputs, "iloc") or _selects(inputs):
        return True
    if hasattr(inputs, "columns"):
        raise TypeError("split_between_processes would go through this table by columns: give its rows as a list.")
    return isinstance(inputs, Dataset) and not isinstance(inputs, IterableDataset)


def _selects(inputs: Any) -> bool:
    # Other tables have a `select` too, for columns.
    return callable(getattr(inputs, "select", None)) and hasattr(inputs, "__getitems__")


def _counted_fields(inputs: Any) -> tuple[int, Any]:
    counted = {}
    for key, value in inputs.items():
        try:
            counted[key] = _counted(value)
        except TypeError as error:
            raise TypeError(
                f"split_between_processes got a {type(inputs).__name__} whose {key!r} can't be split: {error}"
            ) from None
    counts = {key: count for key, (count, _) in counted.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{key!r}: {count}" for key, count in counts.items())
        raise ValueError(f"split_between_processes got a dict whose values differ in length ({listed}).")
    return next(iter(counts.values()), 0), with_items(inputs, {key: value for key, (_, value) in counted.items()})


def _taken(inputs: Any, which: slice | list[int]) -> Any:
    if isinstance(inputs, Mapping):
        return with_items(inputs, {key: _taken(value, which) for key, value in inputs.items()})
    if hasattr(inputs, "_fields"):
        return type(inputs)(*(_taken(value, which) for value in inputs))
    if isinstance(inputs, Tensor | np.ndarray):
        return inputs[which]
    if hasattr(inputs, "iloc"):
        return inputs.iloc[which]
    if isinstance(inputs, list | tuple | range):
        if isinstance(which, slice):
            return inputs[which]
        items = [inputs[i] for i in which]
        return type(inputs)(items) if isinstance(inputs, list | tuple) else items
    indices = range(len(inputs))[which] if isinstance(which, slice) else which
    return inputs.select(indices) if _selects(inputs) else Subset(inputs, indices)
