"""The communication hook, against the same additions on one process."""

import pytest
import torch
from support.processes import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from treadle.strategies import FixedTree
from treadle.strategies.ddp.fixed_order import FixedOrder

import treadle

SIZES = (1, 7, 300, 2, 1001)
V = 4


class Sizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(size) for size in SIZES])

    def forward(self, weights):
        return sum((part * weight).sum() for part, weight in zip(self.parts, weights, strict=True))


def gradients(leaf):
    generator = torch.Generator().manual_seed(leaf)
    return [torch.randn(size, generator=generator) for size in SIZES]


def reduce(options):
    world = treadle.Accelerator(cpu=True, strategy="ddp").world
    tree = FixedTree(V, world.size)
    sums = FixedOrder(tree, world)
    replica = DistributedDataParallel(Sizes(), bucket_cap_mb=0.001, **options)
    sums.register(replica)
    results = []
    for _ in range(3):  # torch rebuilds its buckets after the first
        rows = [row[world.rank] for row in tree.cut(V)]
        for number, leaf in enumerate(rows):
            replica.require_backward_grad_sync = number == len(rows) - 1
            sums.begin(replica.parameters(), number, number == len(rows) - 1, empty=leaf is None)
            weights = [torch.full((size,), torch.nan) for size in SIZES] if leaf is None else gradients(leaf)
            replica(weights).backward()
            sums.end(replica.parameters())
        results.append([p.grad.clone() for p in replica.parameters()])
    return results


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3])
def test_small_buckets_of_uneven_sizes(world):
    first, second, third, fourth = map(gradients, range(V))
    expected = [(a + b) + (c + d) for a, b, c, d in zip(first, second, third, fourth, strict=True)]
    for results in run(reduce, world, {"gradient_as_bucket_view": world == 3}):
        for result in results:
            assert all(map(torch.equal, result, expected))
