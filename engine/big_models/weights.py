"""Where weights come from: a checkpoint's tensors by name, of which nothing is read until it is asked for."""

from __future__ import annotations

import json
import mmap
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .. import disk
from ..manifest import MANIFEST, read_manifest

_DTYPES = {
    name: getattr(torch, kind)
    for name, kind in {
        **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64"},
        **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
        **{"U16": "uint16", "U32": "uint32", "U64": "uint64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
        **{"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
    }.items()
}
_MAX_INDEX_BYTES = 512 * 2**20
_ALIGNMENT = 64  # of torch's own memory


@dataclass(frozen=True)
class Held:
    """A tensor in main memory, or mapped by torch onto its file."""

    tensor: Tensor

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.tensor.dtype

    def get(self, exact: bool = True) -> Tensor:
        """The tensor itself."""
        return self.tensor

    def fill(self, out: Tensor) -> None:
        """Copy it into ``out``."""
        out.copy_(self.tensor)


@dataclass(frozen=True)
class Filed:
    """A tensor in a safetensors file, which is opened anew each time: nothing stays in memory or open.

    Attributes:
        path: The file.
        mark: Its size, time and number when it was looked at; a file that is no longer the same is an error.
        dtype: The tensor's dtype.
        shape: The tensor's shape.
        start: Its first byte in the file.
        nbytes: Its length.
    """

    path: Path
    mark: tuple[int, ...]
    dtype: torch.dtype
    shape: torch.Size
    start: int
    nbytes: int

    def get(self, exact: bool = True) -> Tensor:
        """The tensor, mapped onto the file where that is as good as a copy.

        Args:
            exact: It will be computed with on the CPU. Kernels add up in another order where memory isn't aligned as
                torch aligns it, so the last bits would depend on the place in the file: a copy is made then.
        """
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        if self.start % (_ALIGNMENT if exact else self.dtype.itemsize):
            # Given back when it goes; malloc may keep it.
            own = torch.frombuffer(mmap.mmap(-1, self.nbytes), dtype=torch.uint8)
            out = own.view(self.dtype).view(self.shape)
            self.fill(out)
            return out
        skip = self.start % mmap.ALLOCATIONGRANULARITY
        with self._open() as file:
            # Private: whoever writes to the tensor writes to memory, never to the file.
            view = mmap.mmap(file.fileno(), skip + self.nbytes, access=mmap.ACCESS_COPY, offset=self.start - skip)
        return torch.frombuffer(view, dtype=torch.uint8, offset=skip).view(self.dtype).view(self.shape)

    def fill(self, out: Tensor) -> None:
        """Read it into ``out``: at once where that is plain CPU memory, so that there is no second copy."""
        if out.device.type != "cpu" or out.dtype != self.dtype or not out.is_contiguous():
            out.copy_(self.get(exact=False))
            return
        left = memoryview(out.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        with self._open() as file:
            file.seek(self.start)
            while left:  # one call reads 2 GB at most
                count = file.readinto(left)
                if not count:
                    raise ValueError(f"{self.path}: ends before the tensor at byte {self.start} does.")
                left = left[count:]

    def _open(self) -> Any:
        try:
            file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise ValueError(f"{self.path}: weights lie in it, and it can't be opened: {error.strerror}.") from error
        if _mark(file.fileno()) != self.mark:
            file.close()
            raise ValueError(f"{self.path}: was changed after the model was loaded from it. Load the model again.")
        return file


Piece = Held | Filed
Weights = dict[str, Piece]


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
    return read_safetensors(path) if path.suffix == ".safetensors" else _torch_file(path)


def _folder(path: Path) -> Weights:
    if (path / MANIFEST).is_file():
        files = read_manifest(path).files
        if "model.safetensors" not in files:
            raise ValueError(f"{path}: has no model.safetensors. Its files are {', '.join(sorted(files))}.")
        disk.check_file(path, "model.safetensors", files["model.safetensors"], digests=False)
        return read_safetensors(path / "model.safetensors")
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
        reader = read_safetensors if file.endswith(".safetensors") else _torch_file
        files[file] = reader(path.parent / file)
    lost = [name for name, file in places.items() if name not in files[file]]
    if lost:
        raise ValueError(f"{path}: names tensors that are not in their files: {some(lost)}.")
    return {name: files[file][name] for name, file in places.items()}


def read_safetensors(path: Path) -> Weights:
    """The tensors of one safetensors file, unread.

    Raises:
        ValueError: It is damaged, or holds one process's part of a sharded model.
    """
    try:
        with safe_open(path, framework="pt") as checked:  # it checks the header: every offset lies in the file
            notes = dict(checked.metadata() or {})
        with path.open("rb") as file:
            mark = _mark(file.fileno())
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path}: is not a whole safetensors file: {error}.") from error
    if "DCP_SHARDING_INFO" in notes:
        raise ValueError(f"{path}: holds the shards of one process. Export the model to one file or folder first.")
    weights: Weights = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{path}: {name} has dtype {entry['dtype']}, which torch can't hold.")
        first, last = entry["data_offsets"]
        dtype, shape = _DTYPES[entry["dtype"]], torch.Size(entry["shape"])
        weights[name] = Filed(path.absolute(), mark, dtype, shape, 8 + length + first, last - first)
    try:
        aliases = json.loads(notes.get("aliases", "{}"))  # as Treadle's checkpoints note tied weights
        return weights | {alias: weights[kept] for alias, kept in aliases.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: its note of tied weights is damaged: {error!r}.") from error


def _torch_file(path: Path) -> Weights:
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: holds more than tensors, or is no file of torch.save: {error}") from error
    except (RuntimeError, OSError, EOFError, KeyError) as error:
        raise ValueError(f"{path}: can't be mapped: {error}. Save it again, as safetensors if you can.") from error
    wrong = [name for name, value in state.items() if not isinstance(value, Tensor)] if isinstance(state, dict) else []
    if not isinstance(state, dict) or wrong:
        inside = f"{wrong[0]!r} is a {type(state[wrong[0]]).__name__}" if wrong else f"it is a {type(state).__name__}"
        raise ValueError(f"{path}: must hold a flat dict of tensors, as model.state_dict() is, but {inside}.")
    return {name: Held(tensor.detach()) for name, tensor in state.items()}


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
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        disk.write_tensors(part, tensors, {"format": "pt"})
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return read_safetensors(path)


def _mark(descriptor: int) -> tuple[int, ...]:
    status = os.fstat(descriptor)
    return (status.st_size, status.st_mtime_ns, status.st_ino)


def some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
