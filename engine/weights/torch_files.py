"""Reader of ``torch.save`` files that returns plain data and unread tensors without using ``torch.load``."""

from __future__ import annotations

import io
import math
import mmap
import os
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import pickle_reader
from ..checkpoint import KINDS, FilePiece, MemoryPiece, Piece, read_mark
from .pickle_types import Reader, Unknown

_MAX_DIRECTORY_BYTES = 32 * 2**20  # a zip file's list of entries, about 100 bytes each
_COPIED_AT_LEAST = 2**26
_MAGIC = 0x1950A86A20F9469CFC6C  # files of torch.save before 1.6, or with _use_new_zipfile_serialization=False
_LEGACY_VERSION = 1001
_DTYPES = {kind.__name__: dtype for dtype, kind in KINDS.items()} | {"UntypedStorage": torch.uint8}
"""Dtypes by the names that a pickle gives to storages."""


@dataclass(frozen=True)
class Storage:
    """Block of tensor memory in a file, with ``count`` elements. Several tensors may be views of one block."""

    dtype: torch.dtype
    key: str
    count: int


@dataclass(frozen=True)
class View:
    """Tensor in a file, described as a view of a storage. Offset and strides are numbers of elements."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class TorchFile:
    """File of ``torch.save`` whose pickle is parsed and whose tensors are read on demand.

    Attributes:
        document: The content of the file, as returned by `pickle_reader.read`.
        reader: The `Reader` that converts parts of the document to data. It converts each tensor to a `View`.

    Raises:
        ValueError: If the file is damaged or not supported.
        OSError: If the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._mark = read_mark(file.fileno())
            size = os.fstat(file.fileno()).st_size
            self._places: dict[str, tuple[int, int]] = {}
            self._storages: dict[str, Storage] = {}
            self.reader = Reader(self._note_storage, _TENSORS)
            if file.read(4) == b"PK\x03\x04":
                self.document = self._read_zipped(file, size)
            else:
                self.document = self._read_legacy(file, size)

    def piece(self, view: Any) -> Piece:
        """Return an unread tensor for a `View` from this file.

        Raises:
            ValueError: If the storage of the view is damaged or too short.
        """
        start, nbytes = self._places.get(view.storage.key, (0, -1))
        size = view.dtype.itemsize
        if nbytes < view.storage.count * view.storage.dtype.itemsize:
            raise ValueError(
                f"its storage {view.storage.key!r:.40} is missing or too short. Copy or download the file again"
            )
        elements, shape = math.prod(view.shape), torch.Size(view.shape)
        if not elements:
            return MemoryPiece(torch.empty(shape, dtype=view.dtype, device="cpu"))
        reach = 1 + sum((length - 1) * step for length, step in zip(view.shape, view.stride, strict=True))
        if (view.offset + reach) * size > view.storage.count * view.storage.dtype.itemsize:
            raise ValueError("a tensor extends beyond its storage. Copy or download the file again")
        if elements > reach and elements * size > _COPIED_AT_LEAST:
            raise ValueError("a tensor repeats a small part of the file many times. Save a contiguous copy of it")
        stride = None if reach == elements and view.stride == _compute_strides(view.shape) else view.stride
        first = start + view.offset * size
        return FilePiece(self.path.absolute(), self._mark, view.dtype, shape, first, reach * size, stride)

    def _note_storage(self, pid: Any) -> Storage:
        kind, name, key, _, count = pid[:5] if isinstance(pid, tuple) and len(pid) in (5, 6) else (None,) * 5
        if kind != "storage" or not isinstance(name, pickle_reader.Name) or not isinstance(key, str) or any(pid[5:]):
            raise ValueError("it refers to data other than tensor storages. Save the weights as safetensors")
        word = name.path.rpartition(".")[2]
        if not name.path.startswith("torch.") or word not in _DTYPES:
            raise ValueError(f"it has a storage of the unsupported type {name.path}. Save the weights as safetensors")
        storage = Storage(_DTYPES[word], key, _check_count(count))
        if self._storages.setdefault(key, storage) != storage:
            raise ValueError(
                f"its storage {key!r:.40} is listed with two types or sizes. Copy or download the file again"
            )
        return storage

    def _read_zipped(self, file: Any, size: int) -> Any:
        if _read_directory_bytes(file, size) > _MAX_DIRECTORY_BYTES:
            raise ValueError("its list of entries is too long for a weights file. Save the weights as safetensors")
        try:
            with zipfile.ZipFile(file) as archive:
                entries = _check_entries(archive.infolist())
                root = _find_root(entries)
                file.seek(0)
                for name, entry in entries.items():
                    self._places[name.removeprefix(f"{root}/data/")] = _locate_entry(file, entry, size)
                order = self._read_small(file, f"{root}/byteorder", 16) or b"little"
                if order.strip() != b"little":
                    raise ValueError("it was written on a big-endian machine. Save it again as safetensors")
                data = self._read_small(file, f"{root}/data.pkl", pickle_reader.MAX_BYTES)
        except (zipfile.BadZipFile, struct.error, EOFError, NotImplementedError) as error:
            raise ValueError(f"it is a damaged archive: {error}. Copy or download the file again") from error
        self.reader.budget = _COPIED_AT_LEAST + 4 * len(data)
        return pickle_reader.read(io.BytesIO(data))

    def _read_small(self, file: Any, name: str, limit: int) -> bytes:
        start, nbytes = self._places.get(name, (0, 0))
        if nbytes > limit:
            raise ValueError(
                f"its {name.rpartition('/')[2]} has {nbytes:,} bytes, but at most {limit:,} are allowed. Save the "
                "weights as safetensors"
            )
        file.seek(start)
        return file.read(nbytes)

    def _read_legacy(self, file: Any, size: int) -> Any:
        # Mapped, so that only the pickles, which come first, are read.
        with mmap.mmap(file.fileno(), min(size, pickle_reader.MAX_BYTES), access=mmap.ACCESS_READ) as stream:
            if pickle_reader.read(stream) != _MAGIC or pickle_reader.read(stream) != _LEGACY_VERSION:
                raise ValueError("it is a pickle that torch.save did not write. Save the weights as safetensors")
            system = pickle_reader.read(stream)
            if not isinstance(system, dict) or system.get("little_endian") is not True:
                raise ValueError("it was written on a big-endian machine. Save it again as safetensors")
            document, keys = pickle_reader.read(stream), pickle_reader.read(stream)
            if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
                raise ValueError("its list of storages is damaged. Copy or download the file again")
            start = stream.tell()
        self._follow(document)
        for key in keys:
            file.seek(start)
            count = int.from_bytes(file.read(8), "little")
            storage = self._storages.get(key)
            if storage is None or count != storage.count or start + 8 + count * storage.dtype.itemsize > size:
                raise ValueError(f"its storage {key!r:.40} is truncated or damaged. Copy or download the file again")
            self._places[key] = (start + 8, count * storage.dtype.itemsize)
            start += 8 + count * storage.dtype.itemsize
        return document

    def _follow(self, document: Any) -> None:
        """Record the storages to which a document refers. In old files, only these references state the dtypes."""
        visited: set[int] = set()
        left = [document]
        while left:
            value = left.pop()
            if id(value) in visited or not isinstance(value, pickle_reader.UnbuiltCall | dict | list | tuple):
                continue
            visited.add(id(value))
            if isinstance(value, dict):
                left.extend(value.values())
            elif isinstance(value, list | tuple):
                left.extend(value)
            elif value.name == "persistent":
                self._note_storage(*value.args)
            else:
                left += [value.args, value.state, value.pairs, value.items]


def _read_directory_bytes(file: Any, size: int) -> int:
    """Return the length in bytes that a zip file declares for its directory, without reading the directory."""
    file.seek(max(0, size - 2**16 - 22))
    tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) < at + 22:
        raise ValueError("it is a truncated zip archive. Copy or download the file again")
    sizes = [struct.unpack_from("<I", tail, at + 12)[0]]
    if sizes == [0xFFFFFFFF]:
        sizes = []
    if tail[max(0, at - 20) : at][:4] == b"PK\x06\x07":
        file.seek(struct.unpack_from("<Q", tail, at - 12)[0])
        record = file.read(56)
        if record[:4] == b"PK\x06\x06" and len(record) == 56:
            sizes.append(struct.unpack_from("<Q", record, 40)[0])
    return max(sizes, default=size)


def _check_entries(listed: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    entries = {entry.filename: entry for entry in listed}
    if any("/code/__torch__" in name or name.endswith("/constants.pkl") for name in entries):
        raise ValueError("it is a TorchScript program. Save its state_dict() as safetensors instead")
    if len(entries) != len(listed):
        raise ValueError("two of its entries have the same name. Save the weights as safetensors")
    for name, entry in entries.items():
        if name.startswith("/") or "\\" in name or ".." in name.split("/") or entry.orig_filename != name:
            raise ValueError(
                f"its entry {name!r:.60} has a path that leads out of the archive. Save the weights as safetensors"
            )
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or entry.flag_bits & 1:
            raise ValueError(
                f"its entry {name!r:.60} is compressed or encrypted, which torch.save never does. Save the weights as "
                "safetensors"
            )
    return entries


def _find_root(entries: dict[str, zipfile.ZipInfo]) -> str:
    roots = [name.removesuffix("/data.pkl") for name in entries if name.endswith("/data.pkl")]
    if len(roots) != 1:
        content = "numpy arrays" if any(name.endswith(".npy") for name in entries) else f"{len(roots)} data.pkl entries"
        raise ValueError(
            f"it is a zip archive with {content}, so torch.save did not write it. Save the weights as safetensors"
        )
    return roots[0]


def _locate_entry(file: Any, entry: zipfile.ZipInfo, size: int) -> tuple[int, int]:
    file.seek(entry.header_offset)
    head = file.read(30)
    if head[:4] != b"PK\x03\x04":
        raise ValueError(
            f"its entry {entry.filename!r:.60} is not at the position that the archive's directory states. Copy or "
            "download the file again"
        )
    start = entry.header_offset + 30 + sum(struct.unpack_from("<HH", head, 26))
    if start + entry.file_size > size:
        raise ValueError(f"its entry {entry.filename!r:.60} is truncated. Copy or download the file again")
    return start, entry.file_size


def _check_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError("a tensor's size, stride or offset is not a valid number. Copy or download the file again")
    return value


def _compute_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps = [1]
    for length in reversed(shape[1:]):
        steps.append(steps[-1] * max(length, 1))
    return tuple(reversed(steps)) if shape else ()


def _build_view(
    reader: Reader, storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any, dtype: torch.dtype | None = None
) -> View:
    if not isinstance(storage, Storage) or not isinstance(shape, tuple) or not isinstance(stride, tuple):
        raise ValueError("it describes a tensor in a way that torch.save never does. Save the weights as safetensors")
    shape, stride = tuple(_check_count(n) for n in shape), tuple(_check_count(n) for n in stride)
    if len(shape) != len(stride) or len(shape) > 64 or math.prod(shape) >= 2**62:
        raise ValueError("a tensor has an invalid shape. Copy or download the file again")
    return View(storage, dtype or storage.dtype, _check_count(offset), shape, stride)


def _build_view_v2(
    reader: Reader, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, metadata: Any = None
) -> View:
    if metadata:
        raise Unknown("a lazily conjugated or negated tensor")
    return _build_view(reader, storage, offset, shape, stride)


def _build_view_v3(
    reader: Reader, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *more: Any
) -> View:
    if any(more) or not isinstance(dtype, torch.dtype | pickle_reader.Name):
        raise Unknown("a tensor with an unsupported dtype or metadata")
    resolved_dtype = dtype if isinstance(dtype, torch.dtype) else reader.data(dtype)
    return _build_view(reader, storage, offset, shape, stride, dtype=resolved_dtype)


def _build_of_class(reader: Reader, make: Any, kind: Any, args: Any, state: Any = None) -> Any:
    plain = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
    if (
        not isinstance(make, pickle_reader.Name)
        or getattr(kind, "path", None) not in plain
        or make.path not in _TENSORS
    ):
        raise Unknown(getattr(kind, "path", "a tensor's subclass"))
    return _TENSORS[make.path](reader, *args)


_TENSORS: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _build_view,
    "torch._utils._rebuild_tensor_v2": _build_view_v2,
    "torch._utils._rebuild_tensor_v3": _build_view_v3,
    "torch._utils._rebuild_parameter": lambda reader, data, grad, hooks: data,
    "torch._utils._rebuild_parameter_with_state": lambda reader, data, grad, hooks, state: data,
    "torch._tensor._rebuild_from_type_v2": _build_of_class,
}
