"""The order in which `FixedTree` and `PartialSums` add, against a recursion over all micro-batches."""

import pytest
import torch
from treadle.strategies import FixedTree, PartialSums


def add_all(values, start, size):
    if size == 1:
        return values[start] if start < len(values) else None
    left, right = add_all(values, start, size // 2), add_all(values, start + size // 2, size // 2)
    return left if right is None else left + right


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("count", [8, 5, 1])
def test_every_number_of_ranks_adds_in_the_same_order(world, count):
    tree = FixedTree(8, world)
    leaves = [torch.randn(1000, generator=torch.Generator().manual_seed(n)) for n in range(count)]
    used, totals = [], []
    for rank in range(world):
        parameter, sums = torch.zeros(1000, requires_grad=True), PartialSums()
        rows = [row[rank] for row in tree.cut(count)]
        for number, leaf in enumerate(rows):
            sums.begin([parameter], number, number == len(rows) - 1, empty=leaf is None)
            parameter.grad = torch.full((1000,), torch.nan) if leaf is None else leaves[leaf].clone()
            used += [] if leaf is None else [leaf]
            sums.end([parameter])
        totals.append(torch.zeros(1000) if parameter.grad is None else parameter.grad)
    assert sorted(used) == list(range(count))
    assert torch.equal(tree.add(totals), add_all(leaves, 0, 8))


def test_ranks_stay_in_step():
    tree = FixedTree(8, 3)
    assert tree.parts == [range(4), range(4, 6), range(6, 8)]
    assert tree.cut(8) == [[0, 4, 6], [1, 5, 7], [2, None, None], [3, None, None]]
    assert tree.cut(5) == [[0, 4, None], [1, None, None], [2, None, None], [3, None, None]]
    assert (tree.rows(8), tree.rows(17), tree.leaves_in(4), tree.leaves_in(5)) == (4, 9, 8, 16)


def test_a_parameter_that_some_micro_batches_do_not_use():
    used, unused, sums = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True), PartialSums()
    for number in range(4):
        sums.begin([used, unused], number, number == 3)
        used.grad = torch.tensor([2.0]) if number == 1 else None
        sums.end([used, unused])
    assert used.grad == 2.0
    assert unused.grad is None


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        (6, r"step_micro_batches=6 must be a power of two, .* Use 4 or 8\."),
        (2, r"step_micro_batches=2 must be at least the number of processes, 3"),
        (0, r"step_micro_batches=0 must be an integer of at least 1"),
        (True, r"step_micro_batches=True must be an integer"),
    ],
)
def test_numbers_without_a_tree_are_refused(leaves, message):
    with pytest.raises(ValueError, match=message):
        FixedTree(leaves, 3)
