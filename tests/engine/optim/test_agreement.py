"""Votes of the ranks are exchanged with the gradients, in no reduction of their own."""

import contextlib
import copy
import time

import pytest
import torch
from support.models import ScalarNet
from support.processes import run
from torch import nn
from torch.nn.utils import parameters_to_vector
from treadle.strategies import DDP

import treadle


class Unused(ScalarNet):
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(3, 1).double()


@contextlib.contextmanager
def counted(counts):
    """Appends how often the process group was asked for a reduction, DDP's own included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield
        time.sleep(0.02)  # torch 2.6: gloo's thread notes the end of a reduction after it was waited for
    counts.append(sum(e.count for e in profile.key_averages() if e.key in ("gloo:all_reduce", "gloo:allreduce")))


def steps_with_votes(kind):
    accelerator = treadle.Accelerator(
        cpu=True, strategy=DDP(find_unused_parameters=kind == "unused", static_graph=kind == "static")
    )
    rank, net = accelerator.process_index, Unused() if kind == "unused" else ScalarNet()
    reference = nn.parallel.DistributedDataParallel(copy.deepcopy(net), find_unused_parameters=kind == "unused")
    model = accelerator.prepare_model(net, step="training_step")
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    step = accelerator.method(model, "training_step")
    accelerator.accumulation.agree_on_steps(finite=True, at_once=False)
    inputs = torch.randn(10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))[rank::2]
    seen, ours, theirs = [], [], []
    for number in range(5):
        with counted(ours):
            with accelerator.accumulate(model):
                loss = step((inputs,))
                if number == 3 and rank:
                    loss = loss * float("nan")
                accelerator.accumulation.agreement.record_loss(loss)
                accelerator.accumulation.agreement.stop_vote = bool(rank) and number == 2
                accelerator.backward(loss)
        agreement = accelerator.accumulation.exchange_votes()
        seen.append((agreement.stop, agreement.finite))
        if number == 3:
            bad = accelerator.world.gather_objects(not agreement.local_finite)
            seen.append([rank for rank, is_bad in enumerate(bad) if is_bad])
            agreement.forget_losses()
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
        with counted(theirs):
            (reference(inputs) ** 2).mean().backward()
        plain.step()
        plain.zero_grad()
        assert torch.equal(parameters_to_vector(net.parameters()), parameters_to_vector(reference.parameters()))
    return seen, ours[-1], theirs[-1], model.context


def weights_with_a_ballot():
    accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = nn.Linear(1, 1, bias=False)
    net.training_step = lambda batch: {"loss": net(batch).mean(), "weight": 2}
    model = accelerator.prepare_model(net, step="training_step")
    accelerator.accumulation.agree_on_steps(finite=True, at_once=False)
    found = []
    for _ in range(2):
        for value in (1.0, 2.0):
            with accelerator.accumulate(model):
                output = accelerator.method(model, "training_step")(
                    torch.full((1, 1), value + accelerator.process_index)
                )
                accelerator.backward(output["loss"], weight=output["weight"] * value * (accelerator.process_index + 1))
        assert accelerator.accumulation.exchange_votes().finite
        found.append(net.weight.grad.item())
        net.weight.grad = None
    return found


def votes_and_weights():
    return {
        "ballot": weights_with_a_ballot(),
        "votes": [steps_with_votes(kind) for kind in ("plain", "unused", "static")],
    }


@pytest.fixture(scope="module")
def two_ranks():
    """What two processes found: one start for all of it."""
    return run(votes_and_weights, 2)


@pytest.mark.guarantee
def test_votes_ride_in_the_gradient_reduction(two_ranks):
    first, second = (found["votes"] for found in two_ranks)
    assert first == second
    for seen, ours, theirs, context in first:
        assert seen == [(False, True), (False, True), (True, True), (False, False), [1], (False, True)]
        assert ours == theirs > 0
        assert context == "the user's own"


def test_reported_weights_ride_along(two_ranks):
    # Weights 2, 4 on rank 0 and 4, 8 on rank 1, for the gradients 1, 2 and 2, 3.
    wanted = (2 * 1 + 4 * 2 + 4 * 2 + 8 * 3) / 18
    assert [found["ballot"] for found in two_ranks] == [pytest.approx([wanted, wanted])] * 2
