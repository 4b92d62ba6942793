"""What tells one dataset from another, without reading a sample that is not in memory already."""

from __future__ import annotations

import zlib
from collections.abc import Sized
from typing import Any

from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from ..strategies import World, warn

_LOOKED_AT = 256  # numbers at either end


def fingerprint(dataset: Any) -> str:
    """The kind of a dataset, and a checksum of the numbers at either end of what it holds as tensors or indices."""
    parts = [type(dataset).__name__]
    if isinstance(dataset, Subset):
        indices = dataset.indices
        parts += [_checksum([*indices[:_LOOKED_AT], *indices[-_LOOKED_AT:]]), fingerprint(dataset.dataset)]
    elif isinstance(dataset, ConcatDataset):
        parts += map(fingerprint, dataset.datasets)
    elif isinstance(dataset, TensorDataset):
        parts += [_ends(tensor) for tensor in dataset.tensors]
    return " ".join(parts)


def _ends(tensor: Tensor) -> str:
    first, last = (tensor[rows].flatten() for rows in (slice(1), slice(-1, None)))
    return _checksum([*first[:_LOOKED_AT].tolist(), *last[-_LOOKED_AT:].tolist()])


def _checksum(numbers: list[Any]) -> str:
    return f"{zlib.crc32(repr(numbers).encode()):08x}"


def check_same_data(dataset: Any, world: World) -> None:
    """See that all processes share out one dataset. Call it on all of them.

    Raises:
        ValueError: on every process, if the lengths differ: then steps, and with them exchanges, would too.
    """
    found = world.gather_objects((sized(dataset), fingerprint(dataset)))
    if len({length for length, _ in found}) > 1:
        each = ", ".join(f"rank {rank}: {length}" for rank, (length, _) in enumerate(found))
        raise ValueError(
            f"the processes share out one dataset, but theirs differ in length: {each}. Build the same one everywhere, "
            "or leave each process its own: use_distributed_sampler=False, prepare_data_loader(..., shard=False)."
        )
    if len({marks for _, marks in found}) > 1:
        warn(
            "the processes share out one dataset, but theirs hold different data, so samples are missing or in two "
            "places. Call seed_everything(seed) before random data is made or split, or give it a seeded generator."
        )


def say_other_length(saved: int | None, now: int | None) -> None:
    """Warn that an epoch which was begun with a dataset goes on with one of another length."""
    if saved is not None and now is not None and saved != now:
        warn(
            f"the checkpoint was made within an epoch of {saved:,} samples, and the dataset has {now:,} now: the rest "
            "of the epoch is not what it would have been, and a sample may be missing or seen twice. Resume from an "
            "epoch's end to train on other data."
        )


def sized(value: Any) -> int | None:
    """``len(value)``, or None where it has none."""
    if not isinstance(value, Sized):
        return None
    try:
        return len(value)
    except TypeError:  # a DataLoader over a stream has __len__ and no length
        return None
