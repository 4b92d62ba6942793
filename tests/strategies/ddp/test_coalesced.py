"""Buckets: many tensors sent as few."""

import pytest
import torch
from support.processes import run
from treadle.strategies import open_world
from treadle.strategies.ddp.coalesced import average, average_gradients, broadcast, buckets


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([4, 4, 4, 4], [[4, 4], [4, 4]]),
        ([4, 4, 1], [[4, 4], [1]]),
        ([3, 4, 2], [[3, 4], [2]]),
        ([20, 1], [[20], [1]]),
        ([1, 20, 1], [[1], [20], [1]]),
        ([0, 8, 0], [[0, 8, 0]]),
    ],
)
def test_a_bucket_is_full_before_the_next_begins(sizes, expected):
    tensors = [torch.empty(size) for size in sizes]
    made = list(buckets(tensors, limit=8 * 4))
    assert [[tensor.numel() for tensor in bucket] for bucket in made] == expected
    assert all(a is b for a, b in zip(tensors, [tensor for bucket in made for tensor in bucket], strict=True))


def test_a_bucket_holds_one_dtype():
    tensors = [torch.empty(2, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.float32, torch.int64)]
    made = list(buckets(tensors))
    assert sorted(len(bucket) for bucket in made) == [1, 1, 2]
    assert all(len({tensor.dtype for tensor in bucket}) == 1 for bucket in made)


def exchange():
    world = open_world("cpu")
    rank = world.rank
    # Of three dtypes and shapes; a transposed one has strides that a flat buffer does not have.
    tensors = [torch.full((2, 3), float(rank)).t(), torch.full((), 4.0 * rank).double(), torch.arange(3.0) + rank]
    average(tensors, world)
    averaged = [tensor.tolist() for tensor in tensors]
    broadcast(tensors := [torch.full((2,), float(rank)), torch.full((1,), rank)], world, source=1)
    sent = [tensor.tolist() for tensor in tensors]
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    parameters[0].grad = torch.full((2,), float(rank))
    if rank == 1:
        parameters[1].grad = torch.ones(2)
    sizes, start = [], world.start_all_reduce
    world.start_all_reduce = lambda flat: (sizes.append(flat.numel()), start(flat))[1]
    note = average_gradients(parameters, world, torch.tensor(4.0 * rank))
    assert average_gradients(parameters, world) is None
    return averaged, sent, [p.grad.tolist() for p in parameters], note.item(), sizes


def test_tensors_are_averaged_and_copied_in_place():
    for averaged, sent, gradients, note, sizes in run(exchange, 2):
        assert averaged == [[[0.5] * 2] * 3, 2.0, [0.5, 1.5, 2.5]]
        assert sent == [[1.0, 1.0], [1]]
        assert gradients == [[0.5, 0.5], [0.5, 0.5]]
        assert note == 2.0
        assert sizes == [5, 4]  # a note needs no collective of its own
