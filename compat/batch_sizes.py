"""Sizes of batches and dataloaders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from ..common.messages import name_type, warn

_GIVE = "Compute the batch size yourself instead of calling extract_batch_size."


def extract_batch_size(batch: Any) -> int:
    """Return the length of the first tensor in a nested batch, or 1 for a 0-d tensor. Warn if tensors differ in length.

    Raises:
        ValueError: If the batch contains no tensor.
    """
    try:
        sizes = _iter_sizes(batch)
        first = next(sizes, None)
        differs = first is not None and any(size != first for size in sizes)
    except RecursionError:
        raise RecursionError(f"the batch contains itself, so the batch size is unknown. {_GIVE}") from None
    if first is None:
        raise ValueError(f"the batch ({name_type(batch)}) contains no tensors, so the batch size is unknown. {_GIVE}")
    if differs:
        warn(
            f"tensors in the batch differ in length, so the length of the first tensor, {first}, is used as the batch "
            f"size. {_GIVE}"
        )
    return first


def _iter_sizes(batch: Any) -> Iterator[int]:
    if isinstance(batch, Tensor):
        yield batch.shape[0] if batch.ndim else 1
        return
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        batch = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    if isinstance(batch, Iterable) and not isinstance(batch, str | bytes):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _iter_sizes(part)


def has_iterable_dataset(dataloader: object) -> bool:
    """Return whether a dataloader's dataset is an ``IterableDataset``."""
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def sized_len(dataloader: object) -> int | None:
    """Return a dataloader's length, or None if it has none."""
    try:
        return len(dataloader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def has_len(dataloader: object) -> bool:
    """Return whether a dataloader has a length. Warn about a length of 0 or that of an ``IterableDataset``."""
    length, name = sized_len(dataloader), type(dataloader).__name__
    if length == 0:
        warn(f"the {name} has length 0, so it yields no batches. Check its dataset, batch_size and drop_last.")
    if length is not None and has_iterable_dataset(dataloader):
        warn(
            f"the IterableDataset of the {name} has a length. With num_workers > 0, this length is correct only if "
            "each worker reads its own share of the samples."
        )
    return length is not None
