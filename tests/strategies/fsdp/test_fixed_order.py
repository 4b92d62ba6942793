"""The reduction of FSDP2's gradients, against the same additions on one process."""

import pytest
import torch
from support.processes import run
from torch import nn
from treadle.strategies import FixedTree
from treadle.strategies.fsdp.fixed_order import ShardedSums

import treadle

SHAPES = ((1,), (7, 3), (300,), (2,), (101, 5))  # with shards that are empty or padded
V = 4


class Shapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.parts = nn.ParameterList([torch.zeros(shape) for shape in SHAPES])

    def forward(self, weights):
        return self.inner(weights[1]).sum() + sum((p * w).sum() for p, w in zip(self.parts, weights, strict=True))


def gradients(leaf):
    generator = torch.Generator().manual_seed(leaf)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def reduce(count):
    from torch.distributed.fsdp import fully_shard

    world = treadle.Accelerator(cpu=True, strategy="ddp").world
    tree = FixedTree(V, world.size)
    sums, model = ShardedSums(tree, world), Shapes()
    fully_shard(model.inner)
    fully_shard(model)
    sums.attach(model)
    results = []
    for _ in range(2):
        rows = [row[world.rank] for row in tree.cut(count)]
        for number, leaf in enumerate(rows):
            sums.begin(model.parameters(), number, number == len(rows) - 1, empty=leaf is None)
            model([torch.full(shape, torch.nan) for shape in SHAPES] if leaf is None else gradients(leaf)).backward()
            sums.end(model.parameters())
        results.append([p.grad.full_tensor() for p in (*model.parts, model.inner.weight)])
    return results


@pytest.mark.long
@pytest.mark.parametrize(("world", "count"), [(2, 4), (3, 3)])
def test_uneven_shards_of_two_modules(world, count):
    leaves = [[*gradients(leaf), gradients(leaf)[1].sum(0).expand(2, 3)] for leaf in range(count)]
    expected = [(a + b) + c for a, b, c in zip(leaves[0], leaves[1], leaves[2], strict=True)]
    if count == V:
        expected = [(a + b) + (c + d) for a, b, c, d in zip(*leaves, strict=True)]
    for results in run(reduce, world, count):
        for result in results:
            assert all(map(torch.equal, result[:-1], expected[:-1]))
            torch.testing.assert_close(result[-1], expected[-1])
