"""Parts of tensors in safetensors files."""

import contextlib
import pathlib

import pytest
import torch
from treadle.engine.checkpoint.safetensors_file import FilePiece, Stored


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
