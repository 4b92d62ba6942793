"""Comparison of data between ranks, and between a checkpoint and a run: digests of batches and of datasets."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from ...common.messages import announce, warn
from ...strategies import World
from ...strategies.distributed import view_bytes

_ENDS = 256  # items examined at each end
_BETWEEN = 4096  # items examined in between, evenly spread: sorted indices differ in the middle
_SKETCH = 4096  # smallest keys compared: an overlap of 1 in 1,000 samples is missed in 1 of 60 cases
_PLAIN = (bool, int, float, str, bytes, os.PathLike, np.generic)


def fingerprint(dataset: Any) -> str:
    """Return a digest of a dataset's class and length, and of excerpts of the per-sample data that it holds."""
    parts: list[Any] = [type(dataset).__name__, get_length(dataset)]
    parts += map(_take_excerpt, _iter_columns(dataset))
    parts += [fingerprint(inner) for inner in _list_inner_datasets(dataset)]
    return digest(parts)


def share_data(dataset: Any, world: World) -> bool:
    """Return whether all ranks hold the same dataset, which is then sharded. Call it on all ranks.

    Only excerpts and hashes of the data are compared, so a small difference or overlap may go unnoticed. The check does
    not call ``__getitem__``, because the workers would inherit any file that it opens in this process.

    Returns:
        True if all ranks hold the same dataset. False if no two ranks have a sample in common.

    Raises:
        ValueError: On every rank, if neither is the case.
    """
    identities = world.gather_objects((get_length(dataset), fingerprint(dataset)))
    if len(set(identities)) == 1:
        return True
    sketches = world.gather_objects(_sketch_samples(dataset))
    if all(sketch is not None for sketch in sketches) and _are_disjoint(sketches):
        announce(
            f"{type(dataset).__name__} contains different samples on every rank, so it is treated as already split by "
            "rank. Each rank trains on its own samples. If all ranks should train on the same random data, call "
            "seed_everything(seed) before the dataset is created."
        )
        return False
    lengths = [length for length, _ in identities]
    differ = "contain different data"
    if len(set(lengths)) > 1:
        differ = "differ in length (" + ", ".join(f"rank {r}: {length}" for r, length in enumerate(lengths)) + ")"
    raise ValueError(
        f"the datasets on the ranks {differ}, but a dataset is sharded by index, so samples would be missed or "
        f"repeated. Build the same {type(dataset).__name__} on every rank: call seed_everything(seed) before random "
        "data is created or split, in __init__, setup or train_dataloader (in other hooks, each rank draws its own "
        "numbers), and sort the entries of a directory or a set. If each rank should hold its own share, pass "
        "Trainer(use_distributed_sampler=False) or prepare_data_loader(..., shard=False)."
    )


def warn_length_changed(saved: int | None, current: int | None) -> bool:
    """Warn and return True if an epoch is resumed with a dataset of a different length; None means unknown."""
    is_changed = saved is not None and current is not None and saved != current
    if is_changed:
        warn(
            f"the checkpoint was saved within an epoch of {saved:,} samples, but the dataset now has {current:,}. The "
            "rest of the epoch differs from the uninterrupted run, and samples may be missed or repeated. To train "
            "on other data, resume from the end of an epoch."
        )
    return is_changed


def warn_order_changed(difference: str) -> None:
    """Warn that an epoch is resumed in another order, because of ``difference``."""
    warn(
        f"{difference}. The rest of the epoch differs from the uninterrupted run, and samples may be missed or "
        "repeated. Use the same sampler with the same settings (such as shuffle), or resume from the end of an epoch."
    )


def get_length(value: Any) -> int | None:
    """Return ``len(value)``, or None if ``value`` has no length."""
    if not isinstance(value, Sized):
        return None
    try:
        return len(value)
    except (TypeError, NotImplementedError):  # a DataLoader over a stream has __len__, which raises an error
        return None


def find_least(*counts: int | None) -> int | None:
    """Return the smallest of the counts that are not None; None if all of them are None."""
    return min((count for count in counts if count is not None), default=None)


# -- data per sample ---------------------------------------------------------------------------------------------------


def _iter_columns(dataset: Any) -> Iterator[Any]:
    """Yield the data that a dataset holds in memory with one entry per sample, such as tensors or a Subset's indices.

    For a Hugging Face table without selected rows, yield the digests of its first and last row.
    """
    if isinstance(dataset, Subset):
        yield dataset.indices
        return
    if _is_table(dataset):
        yield _read_table_indices(dataset) if dataset._indices is not None else _digest_table_ends(dataset)
        return
    count = get_length(dataset)
    for _, value in sorted(getattr(dataset, "__dict__", {}).items()):
        for column in value if isinstance(value, tuple) else (value,):  # the columns of a TensorDataset
            if get_length(column) == count and _is_column(column):
                yield column


def _is_column(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return bool(value.ndim) and not getattr(value, "is_meta", False)
    if not isinstance(value, list | tuple) or not value:
        return False
    first = value[0]
    return isinstance(first, _PLAIN) or (isinstance(first, tuple) and all(isinstance(item, _PLAIN) for item in first))


def _strip_common_folder(column: Any) -> list[Any]:
    """Return a column, with absolute paths made relative to their common folder, which may differ between machines."""
    rows = [row if isinstance(row, tuple) and row else (row,) for row in column]
    if not all(isinstance(path, str | os.PathLike) and os.path.isabs(path) for path, *_ in rows):
        return list(column)
    paths = [os.fspath(path) for path, *_ in rows]
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [(os.path.relpath(path, root), *row[1:]) for path, row in zip(paths, rows, strict=True)]


def _list_inner_datasets(dataset: Any) -> Iterable[Any]:
    if isinstance(dataset, ConcatDataset):
        return dataset.datasets
    values = [value for _, value in sorted(getattr(dataset, "__dict__", {}).items())]
    return [value for value in values if isinstance(value, Dataset) or _is_table(value)]


def _take_excerpt(column: Any) -> list[Any]:
    if not len(column):
        return []
    if isinstance(column, Tensor | np.ndarray) and column.ndim > 1:
        return [column[row].reshape(-1)[:_ENDS].tolist() for row in (0, -1)]
    parts = column[:_ENDS], column[:: max(1, len(column) // _BETWEEN)], column[-_ENDS:]
    if isinstance(column, Tensor | np.ndarray):
        return [part.tolist() for part in parts]
    return _strip_common_folder(list(itertools.chain(*parts)))


# -- identity of samples -----------------------------------------------------------------------------------------------


def _sketch_samples(dataset: Any) -> list[int] | None:
    """Return the smallest distinct hashes of the samples; None without hashes, or if at least half are duplicates."""
    keys = _hash_samples(dataset)
    if keys is None:
        return None
    distinct = np.unique(keys)
    return distinct[:_SKETCH].tolist() if 2 * len(distinct) > len(keys) else None


def _are_disjoint(sketches: list[list[int] | None]) -> bool:
    keys = list(itertools.chain.from_iterable(sketch or () for sketch in sketches))
    return len(set(keys)) == len(keys)


def _hash_samples(dataset: Any) -> np.ndarray | None:
    """Return 64-bit hashes of the samples; None if the dataset holds no data in memory.

    For a Hugging Face table without selected rows, return hashes of its first and last row.
    """
    if isinstance(dataset, Subset):
        inner, indices = _hash_samples(dataset.dataset), np.asarray(dataset.indices, dtype=np.int64)
        return _hash_columns(indices) if inner is None else inner[indices]
    if isinstance(dataset, ConcatDataset):
        parts = [_hash_samples(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate(parts)  # type: ignore[arg-type]
    if _is_table(dataset) and dataset._indices is None:
        # Rows in the order of their file: any rows that are not an excerpt of it belong to another file.
        return _hash_columns(_digest_table_ends(dataset))
    columns = [
        _strip_common_folder(column) if isinstance(column, list | tuple) else column
        for column in _iter_columns(dataset)
    ]
    return _hash_columns(*columns) if columns else None


def _hash_columns(*columns: Any) -> np.ndarray:
    rows = zip(*map(_iter_row_bytes, columns), strict=True)
    return np.array([xxhash.xxh3_64_intdigest(b"\0".join(row)) for row in rows], dtype=np.uint64)


def _iter_row_bytes(column: Any) -> Iterator[bytes]:
    if isinstance(column, Tensor):
        column = column.detach().cpu().contiguous()
        column = view_bytes(column).reshape(len(column), -1).numpy() if column.numel() else column.numpy()
    if isinstance(column, np.ndarray) and not column.dtype.hasobject:
        return (row.tobytes() for row in column)
    return (repr(row).encode() for row in column)


# -- Hugging Face's tables ---------------------------------------------------------------------------------------------


def _is_table(dataset: Any) -> bool:
    return type(dataset).__module__.startswith("datasets.") and hasattr(dataset, "_indices")


def _read_table_indices(dataset: Any) -> np.ndarray:
    return dataset._indices.column(0).to_numpy()


def _digest_table_ends(dataset: Any) -> list[Any]:
    table = dataset.data
    ends = [table.slice(0, 1), table.slice(max(0, len(table) - 1), 1)]
    return [digest(end.to_pydict()) for end in ends]


# -- digests -----------------------------------------------------------------------------------------------------------


def digest(value: Any) -> str:
    """Return a hexadecimal 128-bit digest of the contents of ``value``, such as a batch."""
    hasher = xxhash.xxh3_128()
    _feed(hasher.update, value, set())
    return hasher.hexdigest()


def _feed(update: Callable[[Any], None], value: Any, above: set[int]) -> None:
    update(type(value).__name__.encode())
    if value is None or isinstance(value, bool | int | float | complex | str | np.generic):
        update(repr(value).encode())
    elif isinstance(value, bytes | bytearray | memoryview):
        update(value)
    elif isinstance(value, Tensor):
        _feed_tensor(update, value)
    elif isinstance(value, np.ndarray):
        update(f"{value.dtype} {value.shape}".encode())
        update(repr(value.tolist()).encode() if value.dtype.hasobject else np.ascontiguousarray(value).tobytes())
    elif id(value) not in above:  # otherwise it contains itself
        above = above | {id(value)}
        if isinstance(value, Mapping):
            for key, item in value.items():
                _feed(update, key, above)
                _feed(update, item, above)
        elif isinstance(value, Set):
            for text in sorted(map(repr, value)):
                update(text.encode())
        elif isinstance(value, Sequence):
            for item in value:
                _feed(update, item, above)
        elif callable(to_bytes := getattr(value, "tobytes", None)):  # images and arrays of other libraries
            update(to_bytes())
        elif callable(to_numpy := getattr(value, "to_numpy", None)):  # data frames
            _feed(update, to_numpy(), above)
        else:
            for name, item in sorted(getattr(value, "__dict__", {}).items()):
                update(name.encode())
                _feed(update, item, above)


def _feed_tensor(update: Callable[[Any], None], tensor: Tensor) -> None:
    is_subclass = type(tensor) not in (Tensor, torch.nn.Parameter)
    # The subclass may have methods of its own.
    if is_subclass and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
        tensor = torch.Tensor.as_subclass(tensor, Tensor)
    update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if tensor.layout is not torch.strided or tensor.is_quantized:
        update(repr(tensor).encode())
    elif not tensor.is_meta:
        update(view_bytes(tensor.detach().cpu().contiguous()).numpy())
