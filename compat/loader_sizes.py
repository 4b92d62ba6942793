"""What is known of a loader before it is read."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from ..common.messages import warn


def has_iterable_dataset(dataloader: Any) -> bool:
    """Whether a loader reads a stream, whose length nobody knows."""
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def sized_len(dataloader: Any) -> int | None:
    """Return a loader's length, or None where it has none."""
    try:
        return len(dataloader)
    except (TypeError, NotImplementedError):
        return None


def has_len(dataloader: Any) -> bool:
    """Whether a loader has a length; warns of one that is 0, and of a stream's, which its workers may not keep to."""
    length = sized_len(dataloader)
    if length is None:
        return False
    if length == 0:
        warn(f"{type(dataloader).__name__} has length 0: it yields no batch.")
    if has_iterable_dataset(dataloader):
        warn(
            f"{type(dataloader).__name__} has a length and reads an IterableDataset: with loader workers each of them "
            "yields that many samples, unless the stream shares itself out by get_worker_info()."
        )
    return True
