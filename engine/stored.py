"""Tensors in a checkpoint's files: their forms at once, their values when they are asked for, whole or a part."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .filed import OFFSETS, Filed, read_now, read_safetensors

SHAPES = "shapes"
"""The note that says how large the whole tensors are: JSON, ``{name: [...]}``."""

Box = tuple[tuple[int, int], ...]  # begin and end in each dimension


class Stored:
    """One tensor, which may lie in several files, each with a part of it.

    ``stored[...]`` reads it, and so does ``stored[2:4, :]`` with the rows it needs: slices without a step.

    Attributes:
        shape: of the whole.
        dtype: of its elements.
    """

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._pieces: list[tuple[Filed, Box]] = []

    def __getitem__(self, index: Any) -> Tensor:
        """The values, in memory that may be mapped onto the file: copy what is to be kept."""
        cuts = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        wanted = [slice(*cut.indices(size)) for cut, size in zip(cuts, self.shape, strict=False)]
        wanted += [slice(0, size) for size in self.shape[len(wanted) :]]
        box: Box = tuple((cut.start, max(cut.start, cut.stop)) for cut in wanted)
        for piece, held in self._pieces:
            if all(a <= b and d <= c for (a, c), (b, d) in zip(held, box, strict=True)):
                return read_now(piece)[_within(box, held)]
        out = torch.empty([end - begin for begin, end in box], dtype=self.dtype)
        for piece, held in self._pieces:
            both: Box = tuple((max(a, b), min(c, d)) for (a, c), (b, d) in zip(held, box, strict=True))
            if all(begin < end for begin, end in both):
                out[_within(both, box)] = read_now(piece)[_within(both, held)]
        return out

    def get(self, exact: bool = True) -> Tensor:
        """All of it; see `Filed.get`."""
        return self._pieces[0][0].get(exact) if len(self._pieces) == 1 else self[...]

    def fill(self, out: Tensor) -> None:
        """Copy it into ``out``."""
        if len(self._pieces) == 1:
            self._pieces[0][0].fill(out)
        else:
            out.copy_(self[...])

    def read(self) -> Tensor:
        """All of it, in memory of its own."""
        out = torch.empty(self.shape, dtype=self.dtype)
        self.fill(out)
        return out

    def add(self, piece: Filed, offset: Iterable[int]) -> None:
        """Say that a part of it is in a file, and where that begins in the whole.

        Raises:
            ValueError: if it sticks out.
        """
        box = tuple((begin, begin + size) for begin, size in zip(offset, piece.shape, strict=True))
        if len(box) != len(self.shape) or not all(
            0 <= begin <= end <= size for (begin, end), size in zip(box, self.shape, strict=True)
        ):
            raise ValueError(f"a part of tensor {self.name!r} lies outside of it")
        self._pieces.append((piece, box))

    def check_complete(self) -> None:
        """Raise ValueError if parts are missing, or elements there twice."""
        boxes = sorted(box for _, box in self._pieces if all(begin < end for begin, end in box))
        held = sum(math.prod(end - begin for begin, end in box) for box in boxes)
        twice = _any_overlap(boxes)
        if held != self.shape.numel() or twice:
            what = f"{held} of {self.shape.numel()} elements of tensor {self.name!r} are there"
            what += ", some of them twice" if twice else ""
            raise ValueError(f"{self._pieces[0][0].path.parent}: {what}. Use another checkpoint.")


def _any_overlap(boxes: list[Box]) -> bool:
    """Whether two of the boxes, which are sorted and not empty, have an element in common."""
    for number, one in enumerate(boxes):
        for at in range(number + 1, len(boxes)):
            other = boxes[at]
            if one and other[0][0] >= one[0][1]:
                break  # so do all that follow
            if all(max(a, b) < min(c, d) for (a, c), (b, d) in zip(one, other, strict=True)):
                return True
    return False


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(b - a, e - a) for (b, e), (a, _) in zip(box, outer, strict=True))


def open_tensors(paths: Iterable[Path]) -> tuple[dict[str, Stored], dict[str, str]]:
    """Find the tensors that lie in some files.

    Args:
        paths: safetensors files, those of sharded tensors with their notes.

    Returns:
        The tensors by name, and the notes of the first file.

    Raises:
        ValueError: if a file is damaged, or a tensor is not there as a whole.
    """
    found: dict[str, Stored] = {}
    first: dict[str, str] | None = None
    for path in paths:
        try:
            pieces, notes = read_safetensors(path)
            _add_all(found, pieces, notes)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
            raise ValueError(f"{path.parent}: {path.name} is damaged: {error}. Use another checkpoint.") from error
        first = notes if first is None else first
    for stored in found.values():
        stored.check_complete()
    return found, first or {}


def _add_all(found: dict[str, Stored], pieces: dict[str, Any], notes: dict[str, str]) -> None:
    offsets, shapes = (json.loads(notes.get(note, "{}")) for note in (OFFSETS, SHAPES))
    for name, piece in pieces.items():
        whole = torch.Size(shapes[name]) if name in shapes else piece.shape
        stored = found.setdefault(name, Stored(name, whole, piece.dtype))
        if (stored.dtype, stored.shape) != (piece.dtype, whole):
            raise ValueError(f"tensor {name!r} has another form than in another file")
        stored.add(piece, offsets[name]["saved_offsets"] if name in offsets else [0] * len(piece.shape))
