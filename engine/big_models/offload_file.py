"""Files of offloaded weights that are read while a model runs, and the check that their shapes match the model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...common.messages import nearest
from ..checkpoint import FilePiece, Piece, Weights, abbreviate, read_mark, read_whole_model
from ..weights import make_parent, write_atomically, write_file
from .module_tensors import group_tied_names

INDEX = "index.json"


def check_shapes(tensors: Mapping[str, Tensor], weights: Mapping[str, Piece]) -> None:
    """Raise a ValueError if a weight's shape differs from that of the model's tensor with the same name."""
    wrong = [
        f"{name} has shape {list(weights[name].shape)}, but {list(tensor.shape)} in the model"
        for name, tensor in tensors.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    if wrong:
        raise ValueError(
            f"the checkpoint does not fit the model: {abbreviate(wrong)}. Load a checkpoint of this model."
        )


def share_tied_values(tensors: Mapping[str, Tensor], weights: Mapping[str, Piece]) -> Weights:
    """Return the weights of a model's ``tensors``; those of a tied tensor, which a file may have once, by each name."""
    shared: Weights = {}
    for names in group_tied_names(tensors):
        if saved := [name for name in names if name in weights]:
            shared |= dict.fromkeys(names, weights[saved[0]])
    return shared


def open_offloaded(folder: str | os.PathLike[str] | None, index: Mapping[str, Any] | None = None) -> Weights:
    """Open weights that Accelerate's functions have offloaded: raw bytes in ``NAME.dat``, and ``index.json``.

    ``index`` contains entries by weight name, each with ``"dtype"`` and ``"shape"``, or with ``"safetensors_file"`` and
    optionally ``"weight_name"``. Its default is the folder's ``index.json``; without this file, the result is empty.
    """
    if index is None:
        path = None if folder is None else Path(folder) / INDEX
        if path is None or not path.is_file():
            return {}
        index = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(index, dict) or not all(isinstance(entry, dict) for entry in index.values()):
            return {}  # a file of that name from another program
    files: dict[str, Weights] = {}
    weights: Weights = {}
    for name, entry in (index or {}).items():
        if "safetensors_file" in entry:
            file = entry["safetensors_file"]
            if file not in files:
                files[file] = read_whole_model(Path(file))
            stored = entry.get("weight_name", name)
            if stored not in files[file]:
                raise ValueError(
                    f"the offload index maps {name!r} to {stored!r} in {file}, but this file contains no such weight."
                    f"{nearest(stored, files[file])} Set 'weight_name' to the weight's name in the file."
                )
            weights[name] = files[file][stored]
            continue
        if folder is None:
            raise ValueError(
                f"the index has no 'safetensors_file' for {name!r}, and no folder is set. Pass the folder that "
                f"contains {name}.dat."
            )
        weights[name] = open_raw_file(Path(folder).absolute() / f"{name}.dat", entry)
    return weights


def open_raw_file(path: Path, entry: Mapping[str, Any]) -> FilePiece:
    """Return a reference to the tensor whose raw bytes are a file, with the dtype and shape in ``entry``."""
    dtype = getattr(torch, str(entry.get("dtype")), None)
    if not isinstance(dtype, torch.dtype) or "shape" not in entry:
        raise ValueError(
            f"{path.parent / INDEX}: the entry for {path.stem!r} lacks a torch dtype or a shape: {dict(entry)}. "
            "Offload the weights again."
        )
    shape = torch.Size(entry["shape"])
    needed = shape.numel() * dtype.itemsize
    try:
        with path.open("rb") as file:
            mark, size = read_mark(file.fileno()), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ValueError(
            f"the offloaded weight {path} can't be opened: {error.strerror}. Check the folder, or offload the weights "
            "again."
        ) from error
    if size != needed:
        raise ValueError(
            f"{path} has {size} bytes, but a tensor of shape {list(shape)} and dtype {entry['dtype']} needs {needed}. "
            "Offload the weights again."
        )
    return FilePiece(path, mark, dtype, shape, 0, needed)


def write_weights(folder: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> Weights:
    """Write tensors to ``offload.safetensors`` in a folder, replacing the file of an earlier run.

    Returns:
        The tensors in the file, by name. Each is read when it is used.
    """
    path = Path(folder).absolute() / "offload.safetensors"
    make_parent(path)
    write_atomically(path, lambda part: write_file(Path(part), tensors, {}))
    return read_whole_model(path)
