"""Weights that lie on the disk while a model runs, and whether they are of that model."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from ..checkpoint import Piece, Weights, abbreviate, filesystem, read_whole_model


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
        raise ValueError(f"checkpoint: {abbreviate(wrong)}. Is it of this model?")


def write_weights(folder: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> Weights:
    """Write tensors into a folder, to be read from there; a file of an earlier run is replaced."""
    path = Path(folder).absolute() / "offload.safetensors"
    filesystem.make_directory(path.parent)
    _clear_dead(path)
    part = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.part")
    try:
        filesystem.write_tensors(part, tensors, {"format": "pt"})
        filesystem.replace(part, path)
    except BaseException:
        with suppress(OSError):
            filesystem.delete(part)
        raise
    return read_whole_model(path)


def _clear_dead(path: Path) -> None:
    """Delete what processes of this machine left beside ``path`` that were killed while they wrote it."""
    if os.name != "posix":  # nowhere else can a process be asked for without harm
        return
    of_a_process = re.compile(rf"\.{re.escape(path.name)}\.{re.escape(socket.gethostname())}-(\d+)\.part")
    for name in filesystem.list_names(path.parent):
        if match := of_a_process.fullmatch(name):
            try:
                os.kill(int(match[1]), 0)
            except ProcessLookupError:
                filesystem.delete(path.with_name(name))
            except OSError:  # somebody else's
                pass
