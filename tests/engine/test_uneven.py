"""Processes with different numbers of batches, against one process that does by hand what all of them do."""

import pytest
import torch
from processes import run
from torch import nn
from treadle.engine.uneven import join_uneven_inputs

import treadle

COUNTS = (3, 5)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layers(x)


def batches(rank, epoch):
    generator = torch.Generator().manual_seed(10 * rank + epoch)
    return [torch.randn(2, 4, generator=generator) for _ in range(COUNTS[rank])]


def weights(model):
    return [round(value, 5) for p in model.parameters() for value in p.detach().flatten().tolist()]


def joined(accumulate):
    accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    trace = []
    for epoch in range(3):
        with join_uneven_inputs(accelerator, [model]):
            for batch in batches(accelerator.process_index, epoch):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).pow(2).mean())
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        trace.append((weights(model), round(scheduler.get_last_lr()[0], 8)))
        assert not model._join_config.enable  # outside, no forward announces itself
    if accumulate == 1:
        with pytest.raises(ValueError, match="without weight="), join_uneven_inputs(accelerator, [model]):
            accelerator.backward(model(torch.zeros(1, 4)).sum(), weight=1.0)
    with pytest.raises(ValueError, match="even_batches=True"), join_uneven_inputs(accelerator, [model], True):
        pass
    with pytest.raises(TypeError, match="not str"), join_uneven_inputs(accelerator, ["model"]):
        pass
    with pytest.raises(ValueError, match="Net can't be joined"), join_uneven_inputs(accelerator, [Net()]):
        pass
    return trace


def by_hand(accumulate):
    """Each step on the mean over the processes that still have a batch."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    trace = []
    for epoch in range(3):
        shares = [batches(rank, epoch) for rank in range(2)]
        for start in range(0, max(COUNTS) - accumulate + 1, accumulate):
            # A process takes part in a step if it reaches its last batch; what it had before that is lost.
            active = [share[start : start + accumulate] for share in shares if len(share) >= start + accumulate]
            losses = [model(batch).pow(2).mean() / accumulate for part in active for batch in part]
            (sum(losses) / len(active)).backward()
            optimizer.step()
            scheduler.step(), scheduler.step()  # once for each process
            optimizer.zero_grad()
        trace.append((weights(model), round(scheduler.get_last_lr()[0], 8)))
    return trace


@pytest.mark.parametrize("accumulate", [1, 2])
def test_three_and_five_batches(accumulate):
    first, second = run(joined, 2, accumulate, timeout=90)
    assert first == second
    for (found, rate), (expected, expected_rate) in zip(first, by_hand(accumulate), strict=True):
        assert found == pytest.approx(expected, abs=2e-5)
        assert rate == pytest.approx(expected_rate)


def test_one_process_has_nothing_to_join():
    accelerator = treadle.Accelerator(cpu=True)
    model = accelerator.prepare(Net())
    with join_uneven_inputs(accelerator, [model], even_batches=False):
        model(torch.zeros(1, 4))
