"""Weights and data in files that other tools read: whole shards, an index that names them, nothing half-written."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import date, time, timedelta
from functools import partial
from itertools import count
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...common.messages import warn
from ...common.remote_path import AnyPath, RemotePath, absolute, lexists
from ...strategies.distributed import Whole, is_sharded
from ..checkpoint import MANIFEST, check_tensor, encode, filesystem
from ..parameter_names import split_tied

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("IB", 1024))
}
_KINDS = (("model", "safetensors"), ("pytorch_model", "bin"))


def parse_byte_size(size: int | str) -> int:
    """Return a number of bytes, given as one or as ``"500MB"``, ``"2GiB"``.

    Raises:
        ValueError: for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", str(size).upper().strip())
    if isinstance(size, bool) or match is None or match[2] not in _UNITS or not float(match[1]):
        raise ValueError(f"max_shard_size={size!r} must be a number of bytes, or a text such as '500MB' or '2GiB'.")
    return int(float(match[1]) * _UNITS[match[2]])


def save_object(obj: Any, f: Any, safe: bool) -> None:
    """Write data to a path or URL (in one move) or an open file.

    Args:
        obj: what to write.
        f: where.
        safe: as safetensors; of tied tensors the first is written, and the header says for which others.

    Raises:
        TypeError: for what is not data, what ``torch.load(weights_only=True)`` refuses, or for safetensors no dict of
            tensors.
    """
    write: Callable[[Any], None]
    if safe:
        if not isinstance(obj, Mapping) or not all(isinstance(value, Tensor) for value in obj.values()):
            raise TypeError(f"safe_serialization=True takes a dict of tensors by name, not {type(obj).__name__}.")
        _check(obj, any_dtype=False)
        tensors, aliases = split_tied(obj)

        def write(target: Any) -> None:
            if isinstance(target, str):
                write_file(Path(target), tensors, aliases)
            else:
                from safetensors.torch import save as to_bytes

                plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
                target.write(to_bytes(plain, {"format": "pt", **aliases}))
    else:
        encode(obj, "obj")  # only to see that it is data
        obj = make_readable(obj, "obj")

        def write(target: Any) -> None:
            torch.save(obj, target)

    if hasattr(f, "write"):
        write(f)
    else:
        write_atomically(absolute(f), write)


def write_atomically(path: AnyPath, write: Callable[[str], object]) -> None:
    """Let ``write`` write a file beside ``path``, and put it in place once it is complete, durably.

    For an object store the file is written to the folder of temporary files and uploaded from there.
    """
    if isinstance(path, RemotePath):
        with tempfile.TemporaryDirectory(prefix="treadle-") as folder:
            file = Path(folder, path.name)
            write(str(file))
            path.upload(file)
        return
    path = Path(os.path.abspath(path))
    beside = path.parent / f".{path.name}.part"
    try:
        write(str(beside))
        filesystem.fsync(beside)
        filesystem.replace(beside, path)
    except BaseException:
        _clear([beside])
        raise
    filesystem.fsync(path.parent)


def make_parent(path: AnyPath) -> None:
    """Make the folder that a file goes to, durably; an object store needs none."""
    if isinstance(path, Path):
        filesystem.make_directory(path.absolute().parent)


def _clear(paths: Iterable[AnyPath]) -> None:
    """Delete what a failure left, if the disk still lets us; the failure itself is what the caller must hear of."""
    for path in paths:
        with suppress(OSError):
            _delete(path)


def _delete(path: AnyPath) -> None:
    if isinstance(path, RemotePath):
        path.unlink()
    else:
        filesystem.delete(path)


def save_weights(weights: Mapping[str, Any], directory: AnyPath, limit: int, safe: bool) -> None:
    """Write weights as one file or as shards with an index, by the names that Hugging Face's loaders look for.

    At every moment the folder holds the old weights or the new ones, whole: shards get names that no file of the
    folder has (``-v1`` in them where the usual ones are taken), the index takes the old one's place in one move, and
    then the old files go.

    Args:
        weights: tensors by name. Of tied ones the first is written; the file's header says for which others.
        directory: where, a folder or a URL.
        limit: the most bytes of a file, unless one tensor alone has more.
        safe: safetensors, else torch's format.
    """
    others = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if others:
        raise TypeError(f"{others[0]} in the model's state is no tensor; weights are tensors only. Use save_state.")
    _check(weights, any_dtype=not safe)
    write_weights(*split_tied(weights), directory, limit, safe)


def write_weights(
    tensors: Mapping[str, Whole], aliases: Mapping[str, str], directory: AnyPath, limit: int, safe: bool = True
) -> None:
    """As `save_weights`, of tensors that are there once each, or are read one after the other as they are written.

    Args:
        tensors: by name.
        aliases: other names of some of them.
        directory: where.
        limit: the most bytes of a file.
        safe: safetensors, else torch's format, where a tensor stands under its other names too.

    Raises:
        ValueError: the directory is a checkpoint, whose files these would replace. Nothing is written then.
    """
    directory = absolute(directory)
    refuse_checkpoint(directory)
    if isinstance(directory, Path):
        filesystem.make_directory(directory)
    shards = _split_shards(tensors, limit)
    kind, other = _KINDS if safe else _KINDS[::-1]
    files = _choose_free_names(directory, *kind, len(shards))
    size = sum(map(nbytes, tensors.values()))
    placed = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    placed |= {} if safe else {alias: placed[name] for alias, name in aliases.items()}
    index = directory / f"{'.'.join(kind)}.index.json"
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": placed}, indent=2).encode() + b"\n"
    try:
        for file, shard in zip(files, shards, strict=True):
            part = {name: tensors[name] for name in shard}
            write_atomically(directory / file, partial(_write, tensors=part, aliases=aliases, safe=safe))
        if len(files) > 1:
            write_atomically(index, lambda beside: filesystem.write_bytes(Path(beside), text))
    except BaseException:
        if len(files) > 1 and not (index.is_file() and index.read_bytes() == text):  # which would name them
            _clear(directory / file for file in files)
        raise
    # In this order: the other kind's files may be what loaders took until now, and must not give way to older ones.
    for naming in (kind, other):
        _drop_others(directory, *naming, {*files, index.name} if len(files) > 1 else {*files})


def refuse_checkpoint(directory: AnyPath) -> None:
    """See that weights for others do not go into the folder of a checkpoint, whose own files have the same names.

    Raises:
        ValueError: it is one.
    """
    if (directory / MANIFEST).is_file():
        raise ValueError(
            f"{directory} is a checkpoint (it has a {MANIFEST}), and files written into it would destroy it: name "
            "another folder."
        )


def _check(tensors: Mapping[str, Tensor], any_dtype: bool) -> None:
    """Refuse what can't be written, before anything is."""
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            raise TypeError(f"{name} is one process's part of a tensor: save accelerator.get_state_dict(model).")
        check_tensor(tensor, name, any_dtype=any_dtype)


def nbytes(tensor: Whole) -> int:
    """The size of its values, in bytes."""
    return tensor.shape.numel() * tensor.dtype.itemsize


def _split_shards(tensors: Mapping[str, Whole], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and shard_bytes + nbytes(tensor) > limit:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += nbytes(tensor)
    return shards


def _choose_free_names(directory: AnyPath, stem: str, ending: str, number: int) -> list[str]:
    """The names for so many shards; of several, names that no file has. One file replaces another in one move."""
    if number == 1:
        return [f"{stem}.{ending}"]
    for version in count():
        start = f"{stem}-v{version}" if version else stem
        names = [f"{start}-{n:05d}-of-{number:05d}.{ending}" for n in range(1, number + 1)]
        if not any(lexists(directory / name) for name in names):
            break
    return names


def _write(path: str, tensors: Mapping[str, Whole], aliases: Mapping[str, str], safe: bool) -> None:
    if safe:
        write_file(Path(path), tensors, aliases)
    else:
        # Of a view, only what is seen.
        copies = {name: tensor[...].detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        torch.save(copies | {alias: copies[name] for alias, name in aliases.items() if name in copies}, path)


def write_file(path: Path, tensors: Mapping[str, Whole], aliases: Mapping[str, str]) -> None:
    """Write one safetensors file."""
    # Header entries as safetensors' own `save_model` writes them, which its `load_model` reads.
    notes = {alias: name for alias, name in aliases.items() if name in tensors}
    filesystem.write_tensors(path, tensors, {"format": "pt", **notes})


def _drop_others(directory: AnyPath, stem: str, ending: str, new_files: set[str]) -> None:
    """Delete what the new files replace, and what killed processes left of theirs."""
    ours = re.compile(rf"{stem}(-v\d+)?(-\d{{5}}-of-\d{{5}})?\.{ending}(\.index\.json)?")
    entries = {f"{stem}.{ending}", f"{stem}.{ending}.index.json"} - new_files
    existing = filesystem.list_names(directory)
    for name in entries.intersection(existing):  # loaders would take it for the weights, so it may not stay
        _delete(directory / name)
        if isinstance(directory, Path):
            filesystem.fsync(directory)
    left = [name for name in existing if name not in new_files | entries and ours.fullmatch(name)]
    left += [name for name in existing if name[:1] == "." and name[-5:] == ".part" and ours.fullmatch(name[1:-5])]
    try:
        for name in left:
            _delete(directory / name)
    except OSError as error:
        warn(f"the weights in {directory} are saved, but older files can't be deleted: {error}. The next save will.")


_ADVICE: dict[type, str] = {
    PurePath: "store str(it)",
    timedelta: "store its .total_seconds()",
    date: "store its .isoformat()",
    time: "store its .isoformat()",
    np.ndarray: "store torch.from_numpy(it), or its .tolist()",
    frozenset: "store a set",
}


def make_readable(value: Any, place: str) -> Any:
    """What ``torch.load(weights_only=True)`` reads: numpy's numbers become Python's, a defaultdict a plain dict.

    Args:
        value: what `codec.encode` takes. What needs no change stays the same object.
        place: where it is, for the error.

    Raises:
        TypeError: for what it refuses. The text names the place, the type and the fix.
    """
    kind = type(value)
    if isinstance(value, np.generic):
        return value.item()
    if kind in (dict, defaultdict, OrderedDict, Counter):
        pairs = [
            (make_readable(key, f"a key of {place}"), make_readable(item, f"{place}.{key}"))
            for key, item in value.items()
        ]
        old = [part for pair in value.items() for part in pair]
        return (
            value
            if kind is not defaultdict and _has_identical_items(old, [p for pair in pairs for p in pair])
            else dict(pairs)
        )
    if kind in (list, tuple, set):
        items = [make_readable(item, f"{place}.{number}") for number, item in enumerate(value)]
        return value if _has_identical_items(value, items) else kind(items)
    if is_sharded(value):
        raise TypeError(f"{place}: is one process's part of a tensor; save accelerator.get_state_dict(model).")
    for refused, advice in _ADVICE.items():
        if isinstance(value, refused):
            raise TypeError(
                f"{place}: torch.load(weights_only=True) reads no {kind.__name__}, and what is written here is to be "
                f"read without trust: {advice}, or leave it out."
            )
    return value


def _has_identical_items(old: Iterable[Any], new: Iterable[Any]) -> bool:
    """Whether nothing was changed: then the container stays the same object, with what a state dict notes of itself."""
    return all(old_item is new_item for old_item, new_item in zip(old, new, strict=True))
