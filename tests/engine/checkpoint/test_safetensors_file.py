"""Parts of tensors in safetensors files."""

import contextlib
import itertools
import os
import pathlib

import pytest
import torch
from safetensors.torch import save_file
from treadle.engine.checkpoint.safetensors_file import FilePiece, Stored, open_tensors


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("boxes", "whole"),
    [
        ([((0, 2), (0, 4)), ((2, 4), (0, 4))], True),
        ([((0, 4), (0, 2)), ((0, 4), (2, 4))], True),
        ([((0, 2), (0, 2)), ((0, 2), (2, 4)), ((2, 4), (0, 2)), ((2, 4), (2, 4))], True),
        ([((0, 4), (0, 4)), ((4, 4), (0, 4)), ((0, 0), (0, 4))], True),
        ([((0, 2), (0, 4)), ((1, 3), (0, 4))], False),
        ([((0, 3), (0, 2)), ((1, 4), (0, 2)), ((0, 4), (3, 4))], False),
        ([((0, 4), (0, 2)), ((0, 4), (1, 3))], False),
        ([((0, 2), (0, 4)), ((0, 2), (0, 4))], False),
    ],
    ids=range(8),
)
def test_parts_that_overlap(boxes, whole):
    """Their elements add up to the whole, and some of it is nowhere."""
    stored = Stored("x", torch.Size((4, 4)), torch.float32)
    for box in boxes:
        shape = torch.Size(end - begin for begin, end in box)
        piece = FilePiece(pathlib.Path("folder/file"), (), torch.float32, shape, 0, 4 * shape.numel())
        stored.add(piece, [begin for begin, _ in box])
    with contextlib.nullcontext() if whole else pytest.raises(ValueError, match="elements of tensor 'x'"):
        stored.check_complete()


def test_a_file_system_whose_inodes_are_not_stable(tmp_path, monkeypatch):
    """As some mounts of object stores: each time a file is opened, it has another number."""
    path, tensor, numbers, fstat = tmp_path / "w.safetensors", torch.arange(6.0), itertools.count(), os.fstat

    def read(descriptor):
        status = fstat(descriptor)
        return os.stat_result((status[0], next(numbers), *status[2:]), {"st_mtime_ns": status.st_mtime_ns})

    save_file({"w": tensor}, path)
    monkeypatch.setattr(os, "fstat", read)
    stored = open_tensors([path])[0]["w"]
    assert torch.equal(stored[...], tensor)
    os.utime(path, ns=(0, 0))
    with pytest.raises(ValueError, match="was changed after it was opened"):
        stored[...]
