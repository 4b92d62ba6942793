"""Atomic writing of weights and data to files that other tools read."""

from __future__ import annotations

import copy
import json
import os
import re
import tempfile
from argparse import Namespace
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

from ...common.byte_sizes import parse_bytes
from ...common.messages import name_type, warn
from ...common.remote_path import AnyPath, RemotePath, absolute, lexists
from ...strategies.distributed import Whole, is_sharded, split_tied
from ...strategies.processes import IDENTITY, has_ended, identify_process
from ..checkpoint import MANIFEST, UnreadTensor, check_tensor, encode, filesystem

_KINDS = (("model", "safetensors"), ("pytorch_model", "bin"))


def parse_shard_size(max_shard_size: int | str) -> int:
    """Return the maximum size of a shard in bytes, from a number or from text such as ``"500MB"`` or ``"2GiB"``."""
    return parse_bytes(max_shard_size, "max_shard_size", minimum=1, lowercase_b=True)


def save_object(obj: Any, f: Any, safe: bool) -> None:
    """Write data to a path or URL atomically, or to an open file.

    Args:
        obj: Data that ``torch.load(weights_only=True)`` loads, such as tensors. For safetensors, a dict of tensors by
            name.
        f: A path, a URL or an open file.
        safe: Write safetensors instead of torch's format. Only the first of several tied tensors is written. The header
            lists the names of the others.

    Raises:
        TypeError: If ``obj`` cannot be saved in this format, or if ``f`` has the wrong type.
        ValueError: If ``obj`` contains itself or is nested too deeply, or if the URL is invalid.
        OSError, RuntimeError: If the file cannot be written.
    """
    write: Callable[[Any], None]
    if safe:
        if not isinstance(obj, Mapping) or not all(isinstance(value, Tensor) for value in obj.values()):
            items = obj.items() if isinstance(obj, Mapping) else ()
            other = next(
                (f", in which {name!r} is {name_type(v)}" for name, v in items if not isinstance(v, Tensor)), ""
            )
            raise TypeError(
                f"safe_serialization=True got {name_type(obj)}{other}, but supports only a dict of tensors by name. "
                "Use safe_serialization=False for other data."
            )
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
        encode(obj, "obj")  # only to check that it is plain data
        obj = make_readable(obj, "obj")

        def write(target: Any) -> None:
            torch.save(obj, target)

    if hasattr(f, "write"):
        write(f)
    else:
        write_atomically(absolute(f), write)


def write_atomically(path: AnyPath, write: Callable[[str], object]) -> None:
    """Write a file next to ``path``, flush it to disk, and rename it to ``path`` once it is complete.

    ``write`` receives the local path to write to. If ``path`` is in an object store, the file is written to a temporary
    folder and uploaded.
    """
    if isinstance(path, RemotePath):
        with tempfile.TemporaryDirectory(prefix="treadle-") as folder:
            file = Path(folder, path.name)
            write(str(file))
            path.upload(file)
        return
    path = Path(os.path.abspath(path))
    temporary = _choose_part(path)
    try:
        write(str(temporary))
        filesystem.fsync(temporary)
        filesystem.replace(temporary, path)
    except BaseException:
        _clear([temporary])
        raise
    filesystem.fsync(path.parent)


def _choose_part(path: Path) -> Path:
    """Return the path next to a file to which this process alone writes it, and delete those of killed processes.

    Two runs may write the same file at the same time. The last one to complete it wins.
    """
    for name in filesystem.list_names(path.parent):
        if _is_abandoned(name, re.escape(path.name)):
            with suppress(FileNotFoundError):  # another process has deleted it
                filesystem.delete(path.with_name(name))
    return path.with_name(f".{path.name}.{identify_process()}.part")


def _is_abandoned(name: str, file: str) -> bool:
    """Return whether a name is that of an unfinished file, whose writer has ended. ``file`` is a pattern."""
    match = re.fullmatch(rf"\.({file})\.(?P<writer>{IDENTITY})\.part", name)
    return match is not None and has_ended(match["writer"]) is True


def make_parent(path: AnyPath) -> None:
    """Create the parent folder of a file and flush it to disk. URLs are ignored: object stores need no folders."""
    if isinstance(path, Path):
        filesystem.make_directory(path.absolute().parent)


def _clear(paths: Iterable[AnyPath]) -> None:
    """Delete the files of a failed write. Errors are ignored, because the caller raises the error of the write."""
    for path in paths:
        with suppress(OSError):
            _delete(path)


def _delete(path: AnyPath) -> None:
    if isinstance(path, RemotePath):
        path.unlink()
    else:
        filesystem.delete(path)


def save_weights(weights: Mapping[str, Any], directory: AnyPath, limit: int, safe: bool) -> None:
    """Write weights as one file, or as several files with an index, under Hugging Face's file names.

    At any time, the folder contains the complete old or the complete new weights. If there are several new files, they
    get unused names, the new index atomically replaces the old one, and then the old files are deleted. See
    `write_weights` for the arguments.

    Raises:
        TypeError: If a value cannot be exported.
        ValueError: If the directory is a Treadle checkpoint.
    """
    others = [name for name, value in weights.items() if not isinstance(value, Tensor | UnreadTensor)]
    if others:
        raise TypeError(
            f"{others[0]} in the model's state is {name_type(weights[others[0]])}, but only tensors can be exported. "
            "Use save_state, which saves other values too."
        )
    _check({name: value for name, value in weights.items() if isinstance(value, Tensor)}, any_dtype=not safe)
    write_weights(*split_tied(weights), directory, limit, safe)


def write_weights(
    tensors: Mapping[str, Whole], aliases: Mapping[str, str], directory: AnyPath, limit: int, safe: bool = True
) -> None:
    """Write distinct tensors to one or several files; see `save_weights`.

    Safetensors files are written with one tensor read at a time.

    Args:
        tensors: Tensors by name, each under one name only. A value may be a reference to an unread tensor.
        aliases: Further names of tied tensors, each with the name of the tensor in ``tensors``.
        directory: The path or URL of the folder.
        limit: The maximum total size of the tensors in a file, in bytes. A larger tensor gets a file of its own.
        safe: Write safetensors files, with the aliases in the header. If False, write files of ``torch.save``, in which
            a tied tensor is listed under all its names.

    Raises:
        ValueError: If the directory is a Treadle checkpoint.
        OSError, RuntimeError: If a file cannot be written.
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
            write_atomically(index, lambda temporary: filesystem.write_bytes(Path(temporary), text))
    except BaseException:
        if len(files) > 1 and not (index.is_file() and index.read_bytes() == text):  # the index would name them
            _clear(directory / file for file in files)
        raise
    # In this order, because files of the other kind may be the ones that loaders used until now, and must not be
    # replaced by older ones.
    for naming in (kind, other):
        _drop_others(directory, *naming, {*files, index.name} if len(files) > 1 else {*files})


def refuse_checkpoint(directory: AnyPath) -> None:
    """Raise a ValueError if a directory is a Treadle checkpoint, because exported weights would overwrite its files."""
    if (directory / MANIFEST).is_file():
        raise ValueError(
            f"{directory} is a checkpoint (it has a {MANIFEST}), and exported weights would overwrite its files. "
            "Choose another folder."
        )


def _check(tensors: Mapping[str, Tensor], any_dtype: bool) -> None:
    """Raise an error if one of the tensors cannot be written, before any of them is written."""
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            raise TypeError(
                f"{name} is one process's shard of a tensor, not a full tensor. Save accelerator.get_state_dict(model)."
            )
        check_tensor(tensor, name, any_dtype=any_dtype)


def nbytes(tensor: Whole) -> int:
    """Return the size of a tensor's values in bytes."""
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
    """Return unused names for several files; for a single file, the usual name, which a rename can replace."""
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
        # Of a view, only the visible part is copied.
        copies = {name: tensor[...].detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        torch.save(copies | {alias: copies[name] for alias, name in aliases.items() if name in copies}, path)


def write_file(path: Path, tensors: Mapping[str, Whole], aliases: Mapping[str, str]) -> None:
    """Write one safetensors file. Its header stores ``aliases``, the further names of tied tensors."""
    # Header entries in the form that safetensors' `save_model` writes and its `load_model` reads.
    notes = {alias: name for alias, name in aliases.items() if name in tensors}
    filesystem.write_tensors(path, tensors, {"format": "pt", **notes})


def _drop_others(directory: AnyPath, stem: str, ending: str, new_files: set[str]) -> None:
    """Delete the files that the new files replace, and files that killed processes left behind."""
    ours = rf"{stem}(-v\d+)?(-\d{{5}}-of-\d{{5}})?\.{ending}(\.index\.json)?"
    entries = {f"{stem}.{ending}", f"{stem}.{ending}.index.json"} - new_files
    existing = filesystem.list_names(directory)
    for name in entries.intersection(existing):  # loaders would take it for the weights, so it is removed
        _delete(directory / name)
        if isinstance(directory, Path):
            filesystem.fsync(directory)
    left = [name for name in existing if name not in new_files | entries and re.fullmatch(ours, name)]
    left += [name for name in existing if _is_abandoned(name, ours)]
    try:
        for name in left:
            _delete(directory / name)
    except OSError as error:
        warn(
            f"the weights in {directory} are saved, but older files can't be deleted: {error}. The next save tries to "
            "delete them again."
        )


_ADVICE: dict[type, str] = {
    Namespace: "store vars(it)",
    PurePath: "store str(it)",
    timedelta: "store its .total_seconds()",
    date: "store its .isoformat()",
    time: "store its .isoformat()",
    np.ndarray: "store torch.from_numpy(it), or its .tolist()",
    frozenset: "store a set",
}


def make_readable(value: Any, place: str) -> Any:
    """Return a value in a form that ``torch.load(weights_only=True)`` loads.

    NumPy scalars become Python values, and a ``defaultdict`` becomes a dict. ``place`` is the name of the value in
    errors.

    Raises:
        TypeError: If the value, or a nested value, is not supported.
    """
    kind = type(value)
    if isinstance(value, np.generic):
        return value.item()
    if kind in (dict, defaultdict, OrderedDict, Counter):
        copied = {} if kind is defaultdict else copy.copy(value)  # with its attributes, such as a state_dict's metadata
        copied.clear()
        for key, item in value.items():
            copied[make_readable(key, f"a key of {place}")] = make_readable(item, f"{place}.{key}")
        return copied
    if kind in (list, tuple, set):
        return kind(make_readable(item, f"{place}.{number}") for number, item in enumerate(value))
    if is_sharded(value):
        raise TypeError(
            f"{place} is one process's shard of a tensor, not a full tensor. Save accelerator.get_state_dict(model)."
        )
    for refused, advice in _ADVICE.items():
        if isinstance(value, refused):
            raise TypeError(
                f"{place} is {name_type(value)}, which torch.load(weights_only=True) does not load. To fix this, "
                f"{advice}, or remove it."
            )
    return value
