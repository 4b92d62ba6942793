"""Tensors in safetensors files, which are read, or mapped onto their file, on demand."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...common.messages import abbreviate as abbreviate
from ...common.open_files import allow_open_files
from ...strategies.distributed import view_bytes
from .filesystem import DTYPES, RESTORE

OFFSETS = "DCP_SHARDING_INFO"
"""Note in a file's header with the offset of each tensor in the full tensor that it is a shard of.

JSON, ``{name: {"saved_offsets": [...]}}``: the form that ``torch.distributed.checkpoint.HuggingFaceStorageReader``
reads, so torch alone can load a sharded model too.
"""

ALIASES = "aliases"
"""Note in a checkpoint's model with the names of tied tensors: JSON, ``{alias: name}``."""

_MAX_HEADER_BYTES = 64 * 2**20  # about 500,000 tensors in one file
_ALIGNMENT = 64  # the alignment of torch's own memory
_MAPPED_FROM = 2**20  # mapping less takes longer than reading it
_MOST_MAPS = 65_530  # that Linux allows a process; each keeps a file open


@dataclass(frozen=True)
class MemoryPiece:
    """Tensor in main memory, or mapped onto its file by torch."""

    tensor: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.tensor.dtype

    def get(self, exact: bool = True) -> Tensor:
        """Return the tensor itself; ``exact`` has no effect."""
        return self.tensor

    def fill(self, out: Tensor) -> None:
        """Copy the tensor into ``out``."""
        out.copy_(self.tensor)


@dataclass(frozen=True)
class FilePiece:
    """Tensor in a file that is opened for each read, and closed afterwards unless the tensor is mapped.

    Attributes:
        mark: The file's size in bytes, modification time in ns and inode number; a read of a changed file raises an
            error.
        start: Offset of the tensor's first byte in the file.
        nbytes: Length of the tensor's memory in bytes.
        stride: Strides of a tensor that is not contiguous in the file; None if it is.
    """

    path: Path
    mark: tuple[int, ...]
    dtype: torch.dtype
    shape: torch.Size
    start: int
    nbytes: int
    stride: tuple[int, ...] | None = None

    def get(self, exact: bool = True) -> Tensor:
        """Return the tensor, mapped onto the file if that is equivalent to a copy. A mapped tensor keeps the file open.

        With ``exact``, the tensor is copied into aligned memory unless it begins at a multiple of 64 bytes in the file:
        with another alignment, CPU kernels sum in another order, so the last bits would depend on the offset in the
        file.

        Raises:
            ValueError: If the file cannot be opened, has changed or is too short.
            OSError: If the file cannot be mapped.
        """
        if self.nbytes == 0:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        if self.stride is not None:
            memory = replace(self, shape=torch.Size((self.nbytes // self.dtype.itemsize,)), stride=None)
            return memory.get(exact).as_strided(self.shape, self.stride)
        if self.start % (_ALIGNMENT if exact else self.dtype.itemsize):
            # The mapping is released with the buffer; malloc might keep the memory.
            buffer = torch.frombuffer(mmap.mmap(-1, self.nbytes), dtype=torch.uint8)
            out = buffer.view(self.dtype).view(self.shape)
            self.fill(out)
            return out
        skip = self.start % mmap.ALLOCATIONGRANULARITY
        try:
            view = self._map(skip)
        except OSError as error:
            if error.errno != errno.EMFILE or not allow_open_files(_MOST_MAPS):
                raise
            view = self._map(skip)
        return torch.frombuffer(view, dtype=torch.uint8, offset=skip).view(self.dtype).view(self.shape)

    def _map(self, skip: int) -> mmap.mmap:
        """Map the tensor and the ``skip`` bytes before it. The map keeps a descriptor of the file open."""
        with self._open() as file:
            # A private mapping: writes to the tensor change memory, never the file.
            return mmap.mmap(file.fileno(), skip + self.nbytes, access=mmap.ACCESS_COPY, offset=self.start - skip)

    def fill(self, out: Tensor) -> None:
        """Read the tensor into ``out``, directly if ``out`` is a contiguous CPU tensor of the same dtype.

        Raises:
            ValueError: If the file cannot be opened, has changed or is too short.
        """
        if not self.nbytes:  # opening the file takes 20 us, and a header may list a million such tensors
            return
        if self.stride or out.device.type != "cpu" or out.dtype != self.dtype or not out.is_contiguous():
            out.copy_(self.get(exact=False))
            return
        left = memoryview(view_bytes(out.detach()).numpy())  # type: ignore[arg-type]
        with self._open() as file:
            file.seek(self.start)
            while left:  # one call reads at most 2 GB
                count = file.readinto(left)
                if not count:
                    raise ValueError(
                        f"{self.path} is truncated: it ends within the tensor that begins at byte {self.start:,}. Copy "
                        "or download it again."
                    )
                left = left[count:]

    def _open(self) -> Any:
        try:
            file = self.path.open("rb", buffering=0)
        except OSError as error:
            if error.errno == errno.EMFILE and allow_open_files(_MOST_MAPS):
                return self._open()
            raise ValueError(
                f"{self.path} can't be opened: {error.strerror}. Its tensors are read on demand, so the file is still "
                "needed. Restore it, and load the weights again."
            ) from error
        if read_mark(file.fileno()) != self.mark:
            file.close()
            raise ValueError(f"{self.path} was changed after it was opened. Load the weights again.")
        return file


class Piece(Protocol):
    """Interface of a tensor in memory (`MemoryPiece`) or in a file (`FilePiece`)."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""

    def get(self, exact: bool = True) -> Tensor:
        """Return the tensor, mapped onto a file if that is equivalent to a copy; see `FilePiece.get`."""

    def fill(self, out: Tensor) -> None:
        """Copy the tensor into ``out``."""


Weights = dict[str, Piece]


@dataclass(frozen=True)
class UnreadTensor:
    """Tensor of a piece in the model's ``dtype``, which is read each time it is indexed; see `Whole`."""

    piece: Piece
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return self.piece.shape

    def __getitem__(self, index: Any) -> Tensor:
        return read_tensor(self.piece).to(self.dtype)[index]


def read_tensor(piece: Piece) -> Tensor:
    """Return a piece's tensor, to copy values from. A tensor of more than 1 MiB may be mapped onto its file."""
    length = piece.shape.numel() * piece.dtype.itemsize
    if isinstance(piece, MemoryPiece) or length > _MAPPED_FROM:
        return piece.get(exact=False)
    out = torch.empty(piece.shape, dtype=piece.dtype, device="cpu")
    piece.fill(out)
    return out


def read_safetensors(path: Path) -> tuple[Weights, dict[str, str]]:
    """Return references to the tensors of one safetensors file, and the notes in its header.

    Raises:
        ValueError: If the file cannot be read, is damaged, or contains something that is not supported.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"its header has {length:,} bytes, but at most {_MAX_HEADER_BYTES:,} are allowed")
        with safe_open(path, framework="pt") as checked:  # it checks the header: every offset is inside the file
            notes = dict(checked.metadata() or {})
        with path.open("rb") as file:
            mark = read_mark(file.fileno())
            header = json.loads(file.read(8 + length)[8:])
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        reason = str(error).rstrip(".")
        raise ValueError(f"{path} is not a complete safetensors file: {reason}. Copy or download it again.") from error
    weights: Weights = {}
    path = path.absolute()  # once, because a file may have a million tensors
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(
                f"{path}: {name} has dtype {entry['dtype']}, which torch does not support. Convert the tensor to "
                "another dtype, and save the file again."
            )
        first, last = entry["data_offsets"]
        dtype, shape = DTYPES[entry["dtype"]], torch.Size(entry["shape"])
        weights[name] = FilePiece(path, mark, dtype, shape, 8 + length + first, last - first)
    return weights, notes


def read_whole_model(path: Path) -> Weights:
    """Return the tensors of a file that is a complete model, also under the additional names of tied tensors.

    Raises:
        ValueError: If the file is not valid, or contains only one process's shards.
    """
    weights, notes = read_safetensors(path)
    if OFFSETS in notes:
        raise ValueError(
            f"{path} contains the shards of one process. Pass its folder, or export the checkpoint to one file first."
        )
    try:
        return add_aliases(weights, notes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: the list of tied weights is damaged ({type(error).__name__}: {error}). Copy or download the file "
            "again."
        ) from error


def add_aliases(tensors: Mapping[str, Any], notes: Mapping[str, str]) -> dict[str, Any]:
    """Return the tensors, also under the additional names of tied tensors that the notes list."""
    return {**tensors, **{alias: tensors[name] for alias, name in json.loads(notes.get(ALIASES, "{}")).items()}}


def read_mark(descriptor: int) -> tuple[int, ...]:
    """Return the size in bytes and the modification time in ns of an open file, to detect a change.

    The inode number is not included: some network file systems report another one each time a file is opened.
    """
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


SHAPES = "shapes"
"""Note with the shapes of the full tensors: JSON, ``{name: [...]}``."""
Box = tuple[tuple[int, int], ...]  # begin and end in each dimension


class Stored:
    """Tensor that may be stored in several files, each with a shard of it.

    ``stored[...]`` returns the full tensor, ``stored[2:4, :]`` only the rows in the slice. Only ``...`` and slices
    without a step are supported.
    """

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._pieces: list[tuple[FilePiece, Box]] = []

    def __getitem__(self, index: Any) -> Tensor:
        """Return the values, in memory that may be mapped onto the file; copy values that you keep."""
        cuts = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        slices = [slice(*cut.indices(size)) for cut, size in zip(cuts, self.shape, strict=False)]
        slices += [slice(0, size) for size in self.shape[len(slices) :]]
        box: Box = tuple((cut.start, max(cut.start, cut.stop)) for cut in slices)
        for piece, piece_box in self._pieces:
            if all(a <= b and d <= c for (a, c), (b, d) in zip(piece_box, box, strict=True)):
                return read_tensor(piece)[_to_relative_slices(box, piece_box)]
        out = torch.empty([end - begin for begin, end in box], dtype=self.dtype, device="cpu")
        for piece, piece_box in self._pieces:
            both: Box = tuple((max(a, b), min(c, d)) for (a, c), (b, d) in zip(piece_box, box, strict=True))
            if all(begin < end for begin, end in both):
                out[_to_relative_slices(both, box)] = read_tensor(piece)[_to_relative_slices(both, piece_box)]
        return out

    def get(self, exact: bool = True) -> Tensor:
        """Return the full tensor; see `FilePiece.get`."""
        return self._pieces[0][0].get(exact) if len(self._pieces) == 1 else self[...]

    def fill(self, out: Tensor) -> None:
        """Copy the full tensor into ``out``."""
        if len(self._pieces) == 1:
            self._pieces[0][0].fill(out)
        else:
            out.copy_(self[...])

    def read(self) -> Tensor:
        """Return the full tensor, in new memory."""
        out = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.fill(out)
        return out

    def add(self, piece: FilePiece, offset: Iterable[int]) -> None:
        """Add a shard that a file contains, at its offset in the full tensor; raise a ValueError if it does not fit."""
        box = tuple((begin, begin + size) for begin, size in zip(offset, piece.shape, strict=True))
        if len(box) != len(self.shape) or not all(
            0 <= begin <= end <= size for (begin, end), size in zip(box, self.shape, strict=True)
        ):
            raise ValueError(f"a shard of tensor {self.name!r} lies outside the tensor")
        self._pieces.append((piece, box))

    def check_complete(self) -> None:
        """Raise a ValueError unless the shards contain every element exactly once."""
        boxes = sorted(box for _, box in self._pieces if all(begin < end for begin, end in box))
        element_count = sum(math.prod(end - begin for begin, end in box) for box in boxes)
        twice = _has_overlap(boxes)
        if element_count != self.shape.numel() or twice:
            problem = f"the shards contain {element_count} elements of tensor {self.name!r}, which has "
            problem += f"{self.shape.numel()}" + (", and some shards overlap" if twice else "")
            raise ValueError(f"{self._pieces[0][0].path.parent}: {problem}. {RESTORE}")


def _has_overlap(boxes: list[Box]) -> bool:
    """Return whether any two boxes have an element in common. The boxes must be sorted, and none may be empty."""
    for number, box in enumerate(boxes):
        for at in range(number + 1, len(boxes)):
            other = boxes[at]
            if box and other[0][0] >= box[0][1]:
                break  # all later ones are too
            if all(max(a, b) < min(c, d) for (a, c), (b, d) in zip(box, other, strict=True)):
                return True
    return False


def _to_relative_slices(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(b - a, e - a) for (b, e), (a, _) in zip(box, outer, strict=True))


def open_tensors(paths: Iterable[Path]) -> tuple[dict[str, Stored], dict[str, str]]:
    """Open the tensors in several safetensors files, without reading their values.

    Files with shards have the notes `OFFSETS` and `SHAPES`. The notes of the first file are returned too.

    Raises:
        ValueError: If a file cannot be read or is damaged, or a tensor is not complete.
    """
    tensors: dict[str, Stored] = {}
    first: dict[str, str] | None = None
    for path in paths:
        try:
            pieces, notes = read_safetensors(path)
            _add_all(tensors, pieces, notes)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
            if str(error).startswith(str(path)):  # it names the file and the fix
                raise
            reason = error if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
            raise ValueError(f"{path.parent}: {path.name} is damaged: {reason}. {RESTORE}") from error
        first = notes if first is None else first
    for stored in tensors.values():
        stored.check_complete()
    return tensors, first or {}


def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"dtype {str(dtype).removeprefix('torch.')} and shape {tuple(shape)}"


def _add_all(tensors: dict[str, Stored], pieces: dict[str, Any], notes: dict[str, str]) -> None:
    offsets, shapes = (json.loads(notes.get(note, "{}")) for note in (OFFSETS, SHAPES))
    for name, piece in pieces.items():
        whole = torch.Size(shapes[name]) if name in shapes else piece.shape
        stored = tensors.setdefault(name, Stored(name, whole, piece.dtype))
        if (stored.dtype, stored.shape) != (piece.dtype, whole):
            raise ValueError(
                f"tensor {name!r} has {_describe(piece.dtype, whole)}, but {_describe(stored.dtype, stored.shape)} in "
                "another file"
            )
        stored.add(piece, offsets[name]["saved_offsets"] if name in offsets else [0] * len(piece.shape))
