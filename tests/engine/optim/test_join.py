"""Processes with different numbers of batches, against one process that does by hand what all of them do."""

import os
import warnings
from contextlib import nullcontext

import pytest
import torch
from support.models import take_step
from support.processes import run
from torch import nn
from treadle.strategies import DDP

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


def made():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def prepared(**settings):
    accelerator = treadle.Accelerator(cpu=True, **settings)
    return accelerator, *accelerator.prepare(*made())


def joined(accumulate):
    accelerator, model, optimizer, scheduler = prepared(gradient_accumulation_steps=accumulate)
    trace = []
    for epoch in range(3):
        with accelerator.join_uneven_inputs([model]):
            for batch in batches(accelerator.process_index, epoch):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).pow(2).mean())
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        trace.append((weights(model), round(scheduler.get_last_lr()[0], 8)))
        assert not model._join_config.enable  # outside, no forward announces itself
    if accumulate == 1:
        with pytest.raises(ValueError, match="remove weight="), accelerator.join_uneven_inputs([model]):
            accelerator.backward(model(torch.zeros(1, 4)).sum(), weight=1.0)
    return trace


def by_hand(accumulate):
    """Each step on the mean over the processes that still have a batch."""
    model, optimizer, scheduler = made()
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


def trained_by_loader(join, even_batches, **settings):
    """Train on 7 samples in batches of 2, so that the ranks' last batches differ."""
    accelerator, model, optimizer, _ = prepared(**settings)
    torch.manual_seed(1)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.randn(7, 4), batch_size=2, shuffle=True))
    for _ in range(3):
        context = accelerator.join_uneven_inputs([model, optimizer], even_batches) if join else nullcontext()
        with context:
            for batch in loader:
                take_step(accelerator, model, optimizer, batch)
    shards = [getattr(p, "_local_tensor", p) for p in model.parameters()]  # of FSDP, which have no list
    return [shard.detach().flatten().tolist() for shard in shards], optimizer.steps_taken


def with_and_without_join(strategy="ddp", **settings):
    """Return whether training is bit-equal with and without the context, for each value of even_batches."""
    strategies = {"ddp": "ddp", "zero": DDP(zero=True), "bn": DDP(sync_batchnorm=True), "fsdp": "fsdp"}
    settings["strategy"] = strategies[strategy]
    plain = trained_by_loader(False, None, **settings)
    silent = strategy == "ddp" or int(os.environ["RANK"])
    with nullcontext() if silent else pytest.warns(UserWarning, match="join_uneven_inputs has no effect with"):
        return [trained_by_loader(True, even, **settings) == plain for even in (None, False, True)]


def evaluated():
    accelerator, model, optimizer, _ = prepared()
    losses = []
    with accelerator.join_uneven_inputs([model]):
        for batch in batches(accelerator.process_index, 0):
            with torch.no_grad():
                losses.append(model(batch).pow(2).mean().item())
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    return len(losses), weights(model)


def without_batches(rank):
    """Return the weights after an epoch in which only ``rank`` has batches."""
    accelerator, model, optimizer, _ = prepared()
    with accelerator.join_uneven_inputs([model]):
        for batch in batches(0, 0) if accelerator.process_index == rank else []:
            take_step(accelerator, model, optimizer, batch)
    return weights(model)


def refused():
    accelerator = treadle.Accelerator(cpu=True)
    accelerator.prepare(Net())
    with pytest.raises(ValueError, match="Net is not a prepared model"), accelerator.join_uneven_inputs([Net()]):
        pass


def everything():
    refused()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a rank that ran out counts the steps it missed as advanced by its scheduler
        every_batch = joined(1)
    plugin = treadle.utils.GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    return {
        "joined": {1: every_batch, 2: joined(2)},
        "unchanged": [
            with_and_without_join(),
            with_and_without_join(gradient_accumulation_plugin=plugin),
            with_and_without_join("zero"),
        ],
        "evaluated": evaluated(),
        "one rank": [without_batches(rank) for rank in range(2)],
    }


@pytest.fixture(scope="module")
def two_ranks():
    return run(everything, 2, timeout=90)


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
def test_three_and_five_batches(two_ranks, accumulate):
    first, second = (found["joined"][accumulate] for found in two_ranks)
    assert first == second
    for (found, rate), (expected, expected_rate) in zip(first, by_hand(accumulate), strict=True):
        assert found == pytest.approx(expected, abs=2e-5)
        assert rate == pytest.approx(expected_rate)


@pytest.mark.long
def test_with_a_prepared_loader_it_changes_nothing(two_ranks):
    assert [found["unchanged"] for found in two_ranks] == [[[True] * 3] * 3] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["bn", "fsdp"])
def test_what_can_not_do_without_a_rank_says_so_and_trains_on(strategy):
    assert run(with_and_without_join, 2, strategy) == [[True] * 3] * 2


def test_an_evaluation_of_three_and_five_batches(two_ranks):
    first, second = (found["evaluated"] for found in two_ranks)
    assert (first[0], second[0]) == COUNTS
    assert first[1] == second[1]


def test_a_rank_without_any_batch(two_ranks):
    model, optimizer, _ = made()
    for batch in batches(0, 0):
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for by_rank in two_ranks:
        for found in by_rank["one rank"]:
            assert found == pytest.approx(weights(model), abs=2e-5)


@pytest.mark.parametrize(
    ("joinables", "even_batches", "words"),
    [
        (["model"], None, "contains a str"),
        (Net(), None, r"Pass \[model\]"),
        ([], "yes", "even_batches='yes' must be True, False or None"),
    ],
)
def test_wrong_arguments(joinables, even_batches, words):
    accelerator = treadle.Accelerator(cpu=True)
    with pytest.raises(TypeError, match=words), accelerator.join_uneven_inputs(joinables, even_batches):
        pass
    with accelerator.join_uneven_inputs([Net()]):
        pass  # a process alone has nothing to join, and so no model has to be prepared
