"""Steps taken apart, against two workers written by hand in one process."""

import itertools

import pytest
import torch
from support.ddp_loops import Net, sgd, weights
from support.models import take_step
from support.processes import run
from torch.utils.data import DataLoader
from treadle.engine import LocalSGD
from treadle.strategies import DDP

import treadle

SAMPLES, WIDTH = 56, 4  # 7 global batches of 8


def samples():
    return list(torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))


def by_hand(every, k):
    nets = [Net(), Net()]
    steppers = [sgd(net) for net in nets]
    batches = torch.stack(samples()).view(-1, 2, WIDTH, 3)
    starts = range(0, len(batches), k)
    trace = []
    for number, start in enumerate(starts, start=1):
        group = batches[start : start + k]
        for rank, (net, optimizer) in enumerate(zip(nets, steppers, strict=True)):
            optimizer.zero_grad()
            net(group[:, rank].reshape(-1, 3)).pow(2).mean().backward()
            optimizer.step()
        trace.append([weights(net) for net in nets])
        if number % every == 0 or number == len(starts):
            with torch.no_grad():
                for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
                    mean = (a + b) / 2
                    a.copy_(mean), b.copy_(mean)
    return trace, weights(nets[0])


def apart(every, k, enabled=True):
    accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=k)
    net = Net()
    model, optimizer, loader = accelerator.prepare(net, sgd(net), DataLoader(samples(), WIDTH))
    trace = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=every, enabled=enabled) as local_sgd:
        for x in loader:
            take_step(accelerator, model, optimizer, x)
            if accelerator.sync_gradients:
                trace.append(weights(net))
            local_sgd.step()
    inside = weights(net)
    for x in loader:  # reduced again
        take_step(accelerator, model, optimizer, x)
    return trace, inside


def refusals():
    for option in ("zero", "static_graph"):
        accelerator = treadle.Accelerator(cpu=True, strategy=DDP(**{option: True}))
        with pytest.raises(ValueError, match=option), LocalSGD(accelerator, accelerator.prepare(Net()), 2):
            pass


def failing():
    """An error inside is not held up by an average that the other process never comes to."""
    accelerator = treadle.Accelerator(cpu=True)
    model = accelerator.prepare(Net())
    if accelerator.process_index == 0:
        with pytest.raises(ZeroDivisionError), LocalSGD(accelerator, model, 2) as local_sgd:  # noqa: PT012
            local_sgd.step()
            raise ZeroDivisionError


def everything():
    refusals()
    failing()
    cases = {(every, k): apart(every, k) for every, k in itertools.product((1, 3), (1, 2))}
    return cases, apart(2, 1, enabled=False)


@pytest.mark.long
def test_two_workers_meet_every_few_steps_and_at_the_end():
    ranks = run(everything, 2)
    exact = {"rtol": 1e-12, "atol": 1e-12}
    for rank, (cases, _) in enumerate(ranks):
        for (every, k), (trace, end) in cases.items():
            wanted, last = by_hand(every, k)
            assert len(trace) == len(wanted)
            for ours, theirs in zip(trace, wanted, strict=True):
                torch.testing.assert_close(ours, theirs[rank], **exact)
            torch.testing.assert_close(end, last, **exact)
    (_, (plain, _)), (_, (other, _)) = ranks
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def test_on_one_process_it_does_nothing():
    trace, end = apart(2, 1)
    assert torch.equal(trace[-1], end)


@pytest.mark.parametrize("steps", [0, True, 2.0])
def test_a_number_that_is_none(steps):
    accelerator = treadle.Accelerator(cpu=True)
    with pytest.raises(ValueError, match="local_sgd_steps="):
        LocalSGD(accelerator, Net(), steps)
