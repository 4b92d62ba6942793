"""How long operations and exchanges take."""

from functools import partial

import pytest
import torch
from support.planned_models import ADAMW, WIDTH, Block, Net, batch_of, loss, planned
from torch import nn
from treadle.engine.optim.muon import Muon
from treadle.strategies import FSDP, SingleDevice
from treadle.tools.plan.gpus import find_gpu
from treadle.tools.plan.op_costs import estimate_collective_seconds
from treadle.tools.plan.simulation import simulate

import treadle


def test_a_ring_within_a_machine_is_faster_than_between_machines():
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


class Language(nn.Module):
    """Its logits are 64 times as large as their inputs."""

    def __init__(self, chunked):
        super().__init__()
        self.blocks, self.head, self.chunked = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 64 * WIDTH), chunked

    def training_step(self, batch):
        hidden = self.blocks(batch[0])
        if self.chunked:
            return treadle.chunked_cross_entropy(hidden, self.head, batch[1])
        return nn.functional.cross_entropy(self.head(hidden).float(), batch[1])


@pytest.mark.long
@pytest.mark.parametrize(
    ("precision", "own"), [("32-true", False), ("32-true", True), ("bf16-mixed", True)], ids=["torch", "own", "half"]
)
@pytest.mark.parametrize("strategy", [SingleDevice, FSDP])
def test_a_chunked_loss_has_no_logits(precision, own, strategy, monkeypatch):
    if own:
        monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    plain, chunked = (
        simulate(
            partial(Language, chunked), batch_of, lambda step, batch: step(batch), ADAMW, step="training_step",
            world_size=1 if strategy is SingleDevice else 2, strategy=strategy(), precision=precision, micro_batch=2048,
        )
        for chunked in (False, True)
    )  # fmt: skip
    logits, product = 2048 * 64 * WIDTH * 4, 2 * 2048 * WIDTH * 64 * WIDTH
    assert plain.peak - chunked.peak > 1.5 * logits
    recomputes = own or not hasattr(torch.nn, "LinearCrossEntropyOptions")  # torch computes gradients with the loss
    assert chunked.flops - plain.flops == product * recomputes


@pytest.mark.long
def test_processes_take_turns_at_the_matrices_of_muon():
    def build(parameters):
        return Muon([parameter for parameter in parameters if parameter.ndim == 2])

    one, adamw, muon = (
        simulate(Net, batch_of, loss, optimizer, world_size=size, strategy=FSDP(), precision="32-true")
        for size, optimizer in ((1, build), (2, ADAMW), (2, build))
    )
    turns = 2 + 2 + 1  # of two processes, at three matrices of a shape, three of another, and the head
    assert muon.traffic.count == {**adamw.traffic.count, "all_to_all": 2 * turns}
    assert (muon.flops - adamw.flops) / (one.flops - adamw.flops) == pytest.approx(0.6, abs=0.1)
