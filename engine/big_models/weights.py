"""Where weights come from: a checkpoint's tensors by name, of which nothing is read until it is asked for."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from .. import disk
from ..filed import Piece, Weights, some, whole_model
from ..manifest import MANIFEST
from ..parts import open_part

_MAX_INDEX_BYTES = 32 * 2**20  # some 300,000 tensors; a million would take half a minute


def open_weights(checkpoint: str | os.PathLike[str]) -> Weights:
    """The tensors of a checkpoint by name, unread.

    Args:
        checkpoint: A safetensors file; a ``.index.json`` that names several; a folder with one of these, also a
            checkpoint of Treadle; or a file of ``torch.save``, which is read without running what it holds.

    Raises:
        ValueError: It is none of these, or is damaged, or a file is missing.
    """
    path = Path(checkpoint)
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise ValueError(f"checkpoint {str(path)!r} is neither a file nor a folder.")
    if path.name.endswith(".index.json"):
        return _index(path)
    return whole_model(path) if path.suffix == ".safetensors" else _torch_file(path)


def _folder(path: Path) -> Weights:
    if (path / MANIFEST).is_file():
        return dict(open_part(path, "model")[0])
    names = disk.names(path)
    usual = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")
    found = [name for name in usual if name in names][:1]
    for ending in (".index.json", ".safetensors"):
        found = found or [name for name in names if name.endswith(ending)]
    if len(found) != 1:
        what = f"more than one checkpoint: {', '.join(found)}" if found else f"no checkpoint; its files: {names[:10]}"
        raise ValueError(f"{path}: holds {what}. Name the file, or the .index.json of several.")
    return open_weights(path / found[0])


def _index(path: Path) -> Weights:
    document = disk.read_json(path, _MAX_INDEX_BYTES)
    places = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ValueError(f"{path}: has no weight_map of tensor names to file names.")
    files: dict[str, Weights] = {}
    for file in dict.fromkeys(places.values()):
        if file != os.path.basename(file) or file in ("", ".", ".."):
            raise ValueError(f"{path}: {file!r:.80} is not the name of a file beside it.")
        if not (path.parent / file).is_file():
            lost = [name for name, place in places.items() if place == file]
            raise ValueError(f"{path}: names {file}, which is missing, for {some(lost)}.")
        reader = whole_model if file.endswith(".safetensors") else _torch_file
        files[file] = reader(path.parent / file)
    lost = [name for name, file in places.items() if name not in files[file]]
    if lost:
        raise ValueError(f"{path}: names tensors that are not in their files: {some(lost)}.")
    return {name: files[file][name] for name, file in places.items()}


def _torch_file(path: Path) -> Weights:
    from ..foreign.sources import torch_weights  # which builds on this package

    return torch_weights(path)


def check_shapes(tensors: Mapping[str, Tensor], weights: Mapping[str, Piece]) -> None:
    """Refuse weights of other shapes than those of a model's tensors of the same names.

    Raises:
        ValueError: It names them, with both shapes.
    """
    wrong = [
        f"{name} is {list(weights[name].shape)} there and {list(tensor.shape)} in the model"
        for name, tensor in tensors.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    if wrong:
        raise ValueError(f"checkpoint: {some(wrong)}. Is it of this model?")


def write_weights(folder: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> Weights:
    """Write tensors into a folder, to be read from there; a file of an earlier run is replaced."""
    path = Path(folder).absolute() / "offload.safetensors"
    disk.make_directory(path.parent)
    _clear_dead(path)
    part = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.part")
    try:
        disk.write_tensors(part, tensors, {"format": "pt"})
        disk.replace(part, path)
    except BaseException:
        with suppress(OSError):
            disk.delete(part)
        raise
    return whole_model(path)


def _clear_dead(path: Path) -> None:
    """Delete what processes of this machine left beside ``path`` that were killed while they wrote it."""
    if os.name != "posix":  # nowhere else can a process be asked for without harm
        return
    of_a_process = re.compile(rf"\.{re.escape(path.name)}\.{re.escape(socket.gethostname())}-(\d+)\.part")
    for name in disk.names(path.parent):
        if found := of_a_process.fullmatch(name):
            try:
                os.kill(int(found[1]), 0)
            except ProcessLookupError:
                disk.delete(path.with_name(name))
            except OSError:  # somebody else's
                pass
