"""Weights and data in files that other tools read: whole shards, an index that names them, nothing half-written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..strategies.shards import Whole
from . import disk
from .codec import encode, view_key

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("IB", 1024))
}
_COMPILED = "_orig_mod."


def own_name(name: str) -> str:
    """A parameter's name without what ``torch.compile`` puts into it."""
    return name.replace(_COMPILED, "")


def byte_size(size: int | str) -> int:
    """Return a number of bytes, given as one or as ``"500MB"``, ``"2GiB"``.

    Raises:
        ValueError: for anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", str(size).upper().strip())
    if isinstance(size, bool) or found is None or found[2] not in _UNITS or not float(found[1]):
        raise ValueError(f"max_shard_size={size!r} must be a number of bytes, or a text such as '500MB' or '2GiB'.")
    return int(float(found[1]) * _UNITS[found[2]])


def save_object(obj: Any, f: Any, safe: bool) -> None:
    """Write data to a path (in one move) or an open file.

    Raises:
        TypeError: for what is not data, or for safetensors no dict of tensors.
    """
    write: Callable[[Any], None]
    if safe:
        if not isinstance(obj, Mapping) or not all(isinstance(value, Tensor) for value in obj.values()):
            raise TypeError(f"safe_serialization=True takes a dict of tensors by name, not {type(obj).__name__}.")
        tensors = _untied(obj)[0]

        def write(target: Any) -> None:
            if isinstance(target, str):
                disk.write_tensors(Path(target), tensors, {"format": "pt"})
            else:
                from safetensors.torch import save as to_bytes

                target.write(to_bytes({name: t.detach().cpu().contiguous() for name, t in tensors.items()}))
    else:
        encode(obj, "obj")  # only to see that it is data

        def write(target: Any) -> None:
            torch.save(obj, target)

    if hasattr(f, "write"):
        write(f)
    else:
        in_one_move(Path(f), write)


def in_one_move(path: Path, write: Callable[[str], None]) -> None:
    """Let ``write`` write a file beside ``path``, and put it in place once it is complete."""
    path = Path(os.path.abspath(path))
    beside = path.parent / f".{path.name}.part"
    try:
        write(str(beside))
        disk.fsync(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    disk.fsync(path.parent)


def _untied(weights: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, each once, and which name stands for which of the others."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in weights.items():
        kept = first.setdefault(view_key(tensor), name)
        if kept == name:
            tensors[name] = tensor
        else:
            aliases[name] = kept
    return tensors, aliases


def save_weights(weights: Mapping[str, Any], directory: Path, limit: int, safe: bool) -> None:
    """Write weights as one file or as shards with an index, by the names that Hugging Face's loaders look for.

    New files are complete before the first old one is touched, and the index comes last.

    Args:
        weights: tensors by name. Of tied ones the first is written; the file's header says for which others.
        directory: where.
        limit: the most bytes of a file, unless one tensor alone has more.
        safe: safetensors, else torch's format.
    """
    others = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if others:
        raise TypeError(f"{others[0]} in the model's state is no tensor; weights are tensors only. Use save_state.")
    write_weights(*_untied(weights), directory, limit, safe)


def write_weights(
    tensors: Mapping[str, Whole], aliases: Mapping[str, str], directory: Path, limit: int, safe: bool = True
) -> None:
    """As `save_weights`, of tensors that are there once each, or are read one after the other as they are written.

    Args:
        tensors: by name.
        aliases: other names of some of them.
        directory: where.
        limit: the most bytes of a file.
        safe: safetensors, else torch's format.
    """
    shards = _shards(tensors, limit)
    stem, ending = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    files = [
        f"{stem}.{ending}" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.{ending}"
        for number in range(1, len(shards) + 1)
    ]
    disk.make_directory(Path(os.path.abspath(directory)))
    new: list[tuple[Path, Path]] = []
    try:
        for file, shard in zip(files, shards, strict=True):
            new.append((directory / f".{file}.part", directory / file))
            _write(new[-1][0], {name: tensors[name] for name in shard}, aliases, safe)
        index = directory / f"{stem}.{ending}.index.json"
        if len(shards) > 1:
            new.append((directory / f".{index.name}.part", index))
            size = sum(map(nbytes, tensors.values()))
            placed = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
            document = {"metadata": {"total_size": size}, "weight_map": placed}
            new[-1][0].write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            disk.fsync(new[-1][0])
        for beside, path in new:
            os.replace(beside, path)
    finally:
        for beside, _ in new:
            beside.unlink(missing_ok=True)
    _drop_others(directory, stem, ending, {path.name for _, path in new})
    disk.fsync(directory)


def nbytes(tensor: Whole) -> int:
    """The size of its values, in bytes."""
    return tensor.shape.numel() * tensor.dtype.itemsize


def _shards(tensors: Mapping[str, Whole], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        if shards[-1] and held + nbytes(tensor) > limit:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += nbytes(tensor)
    return shards


def _write(path: Path, tensors: Mapping[str, Whole], aliases: Mapping[str, str], safe: bool) -> None:
    if safe:
        write_file(path, tensors, aliases)
    else:
        # Of a view, only what is seen.
        torch.save({name: tensor[...].detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)
        disk.fsync(path)


def write_file(path: Path, tensors: Mapping[str, Whole], aliases: Mapping[str, str]) -> None:
    """Write one safetensors file, durably."""
    # Header entries as safetensors' own `save_model` writes them, which its `load_model` reads.
    notes = {alias: kept for alias, kept in aliases.items() if kept in tensors}
    disk.write_tensors(path, tensors, {"format": "pt", **notes})
    disk.fsync(path)


def _drop_others(directory: Path, stem: str, ending: str, kept: set[str]) -> None:
    ours = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.{ending}(\.index\.json)?")
    for name in disk.names(directory):
        if ours.fullmatch(name) and name not in kept:
            (directory / name).unlink()
