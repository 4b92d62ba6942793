"""The norm in halves: the same bits for full gradients and for shards, and close to torch's norm."""

import math

import pytest
import torch
from support.processes import run
from torch import nn
from treadle.strategies.distributed import clip_to_norm

import treadle

SHAPES = [(101, 37), (101,), (67, 101), (1,), (3, 2, 5), (1, 128)]


def parameters(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for parameter in made:
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    return made


def compute_norms(fixed):
    from torch.distributed.tensor import Shard, distribute_tensor

    world = treadle.Accelerator(cpu=True, strategy="ddp").world
    results = []
    for seed in range(40):
        made = parameters(seed)
        if world.size > 1:
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world.size,))
            for parameter in made[1:]:  # the first remains whole
                gradient = distribute_tensor(parameter.grad, mesh, [Shard(0)])
                parameter.grad = None
                parameter.data = distribute_tensor(parameter.data, mesh, [Shard(0)])
                parameter.grad = gradient
        for norm_type in (2.0, 1.0, math.inf):
            results += [clip_to_norm(made, 0.5, norm_type, world if fixed else None).item() for _ in range(2)]
    return results


@pytest.mark.long
def test_the_same_bits_for_shards():
    alone = compute_norms(True)
    assert [run(compute_norms, world, True) for world in (2, 3)] == [[alone] * 2, [alone] * 3]
    # The order of torch's sums depends on the shards. Of a single row, the second process has an empty shard.
    sharded, whole = run(compute_norms, 2, False)[0], compute_norms(False)
    assert sharded != whole
    assert sharded == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_close_to_the_norm_of_torch(norm_type):
    world = treadle.Accelerator(cpu=True).world
    ours, torchs = parameters(0), parameters(0)
    norm = clip_to_norm(ours, 0.5, norm_type, world)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(torchs, 0.5, norm_type))
    for own, theirs in zip(ours, torchs, strict=True):
        torch.testing.assert_close(own.grad, theirs.grad)


def test_values_that_are_not_finite_empty_and_half_gradients():
    world = treadle.Accelerator(cpu=True).world
    made = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in ((), (0, 3), (4, 0), (2, 2))]
    for parameter in made:
        parameter.grad = torch.full_like(parameter, 3.0)
    assert clip_to_norm(made, 100.0, 2.0, world) == pytest.approx(math.sqrt(45))
    made[0].grad.fill_(math.nan)
    assert clip_to_norm(made, 1.0, 2.0, world).isnan()
    assert made[3].grad.eq(3.0).all()
    made[0].grad.fill_(math.inf)
    assert clip_to_norm(made, 1.0, 2.0, world).isinf()
