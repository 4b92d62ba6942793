"""What is measured of a simulated step: memory, traffic and streams."""

import pytest
import torch
from support.planned_models import ADAMW, CLASSES, LAYERS, WIDTH, Net, batch_of, loss, planned
from torch import nn
from treadle.strategies import DDP, FSDP, SingleDevice
from treadle.tools.plan.meter import Clocks
from treadle.tools.plan.simulation import simulate


def test_states_are_those_of_the_arithmetic():
    parameters = LAYERS * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH) + CLASSES * WIDTH + CLASSES
    single = planned("single", 1, 0, strategy=SingleDevice())
    assert single.parameters == parameters
    tensors = LAYERS * 4 + 2
    assert single.states == {"parameters": 4 * parameters, "optimizer": 8 * parameters + 4 * tensors}
    assert single.memory["gradients"] == 4 * parameters
    assert single.checkpoint == 12 * parameters + 4 * tensors
    assert not single.traffic.count


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("left", torch.ones(4), persistent=False)
        self.remembered = torch.arange(WIDTH)  # neither a parameter nor a buffer

    def forward(self, samples):
        return self.head(self.frozen(self.embedding.weight[: len(samples)] * self.remembered))


@pytest.mark.parametrize(("strategy", "size"), [(SingleDevice, 1), (DDP, 2), (FSDP, 1)])
def test_what_is_tied_counts_once_and_what_is_frozen_has_no_state(strategy, size):
    plan = simulate(
        Tied, lambda samples: (torch.zeros(samples, WIDTH), torch.zeros(samples, dtype=torch.int64)), loss, ADAMW,
        world_size=size, strategy=strategy(), precision="32-true",
    )  # fmt: skip
    tied, frozen = CLASSES * WIDTH, WIDTH * WIDTH
    assert (plan.parameters, plan.trainable) == (tied + frozen, tied)
    assert plan.states == {"parameters": 4 * (tied + frozen + 3 + 4), "optimizer": 8 * tied + 4}
    assert plan.checkpoint == 4 * (tied + frozen + 3) + 8 * tied + 4


def by_branch(model, batch):
    value = loss(model, batch)
    return value if value > 0 else -value


def by_mask(model, batch):
    return model(batch[0])[batch[1] == 0].mean()


def by_numpy(model, batch):
    return loss(model, batch) * batch[0].numpy().sum()


@pytest.mark.long
@pytest.mark.parametrize("curious", [by_branch, by_mask, by_numpy])
def test_a_value_that_is_looked_at_is_named(curious):
    line = curious.__code__.co_firstlineno + (2 if curious is by_branch else 1)
    with pytest.raises(ValueError, match=rf"reads a tensor's value \(.*test_meter.py, line {line}\)"):
        simulate(Net, batch_of, curious, ADAMW, world_size=2, strategy=FSDP(), precision="32-true")
    assert not torch.distributed.is_initialized()


def test_a_stream_waits_for_another():
    clocks = Clocks()
    other = clocks.Stream(priority=-1)
    clocks.spend(2.0)
    with clocks.stream(other):
        clocks.spend(1.0)
        done = other.record_event()
    assert (clocks.compute.time, other.time) == (2.0, 1.0)
    clocks.current_stream().wait_event(done)
    assert clocks.compute.time == 2.0
    other.wait_stream(clocks.compute)
    assert other.time == 2.0
    group = (0, 1)
    with clocks.stream(other):
        assert clocks.exchange(group, 3.0, wait=True) == 5.0
    assert clocks.exchange(group, 1.0, wait=False) == 6.0  # after the one before, though this stream was free at 2
    assert clocks.compute.time == 2.0
