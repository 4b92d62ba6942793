"""How long operations and exchanges take."""

from functools import partial

import pytest
import torch
from support.planned_models import planned
from torch import nn
from treadle.strategies import SingleDevice


def test_a_ring_within_a_machine_is_faster_than_between_machines():
    from treadle.tools.plan.gpus import find_gpu
    from treadle.tools.plan.op_costs import estimate_collective_seconds

    gpu, size = find_gpu("h100"), 400_000_000
    inside = estimate_collective_seconds("all_gather", size, tuple(range(8)), gpu)
    across = estimate_collective_seconds("all_gather", size, tuple(range(16)), gpu)
    strided = estimate_collective_seconds("all_gather", size, tuple(range(0, 128, 8)), gpu)
    assert inside < min(across, strided)
    assert inside == pytest.approx(size * 7 / 8 / 370e9, rel=0.1)
    assert estimate_collective_seconds("all_reduce", size, tuple(range(8)), gpu) == pytest.approx(2 * inside, rel=0.1)
    assert estimate_collective_seconds("all_gather", size, (0,), gpu) == 0.0
    everyone = tuple(range(1024))  # a ring has 1,024 hops, a tree's depth grows with the logarithm
    assert 1e-4 < estimate_collective_seconds("all_reduce", 1000, everyone, gpu) < 5e-4
    assert estimate_collective_seconds("all_gather", 1000, everyone, gpu) > 4e-3
    with pytest.raises(ValueError, match="Did you mean 'h100'"):
        find_gpu("h10")


def products(width):
    """A step that is little else than products of big matrices."""
    from treadle.tools.plan.simulation import simulate

    def made(precision, **options):
        return simulate(
            lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4))),
            lambda samples: torch.zeros(samples, width), lambda model, batch: model(batch).mean(),
            partial(torch.optim.SGD, lr=1.0), world_size=1, strategy=SingleDevice(), micro_batch=2 * width,
            precision=precision, **options,
        )  # fmt: skip

    return made


def test_float32_is_as_fast_as_torch_may_make_it():
    plan = products(8192)
    half, single = plan("bf16-true"), plan("32-true")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        tf32 = plan("32-true")
    finally:
        torch.set_float32_matmul_precision(before)
    arithmetic = [each.spent["arithmetic"] for each in (half, tf32, single)]
    assert arithmetic[1] / arithmetic[0] == pytest.approx(989 / 494)
    assert arithmetic[2] / arithmetic[0] == pytest.approx(989 / 66.9)
    assert sum(single.spent.values()) == pytest.approx(single.seconds)


def test_the_band_is_narrow_only_where_the_like_was_checked():
    def width(plan):
        return plan.band[2] / plan.band[0]

    big = products(8192)
    assert big("bf16-true").checked
    assert width(big("bf16-true")) < 1.11
    for other in (big("32-true"), big("bf16-true", gpu="a100"), products(512)("bf16-true")):
        assert not other.checked
        assert width(other) > 1.6


def test_a_small_step_waits_for_the_host():
    plan = planned("single", 1, 0, strategy=SingleDevice())
    assert plan.host_bound
    assert plan.band == plan.host
    assert plan.band[0] == pytest.approx(plan.launched * 5e-6)
    assert not products(8192)("bf16-true").host_bound
