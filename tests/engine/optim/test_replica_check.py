"""Replicas that are no longer replicas are found, named and measured; those that are cause no word."""

import re

import pytest
import torch
from support.ddp_loops import message
from support.models import take_step
from support.processes import run
from torch import nn
from treadle.strategies import DDP

import treadle

DEBUG = {"TREADLE_DEBUG": "1"}


def make(accelerator, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    torch.manual_seed(accelerator.process_index)  # each process has data of its own
    return net, model, optimizer


def step(accelerator, called, optimizer):
    take_step(accelerator, called, optimizer, torch.randn(4, 3))


def by_hand():
    accelerator = treadle.Accelerator(cpu=True)
    net, model, optimizer = make(accelerator)
    odd = accelerator.process_index == accelerator.num_processes - 1
    for _ in range(2):
        step(accelerator, model, optimizer)
    found = [message(accelerator.check_replicas), message(lambda: accelerator.check_replicas(buffers=True))]
    with torch.no_grad():
        if odd:  # the sum and the set of values stay as they are
            net[2].weight[0, 0], net[2].weight[0, 3] = net[2].weight[0, 3].clone(), net[2].weight[0, 0].clone()
        apart = (net[2].weight[0, 0] - net[2].weight[0, 3]).abs().item()
    found.append(message(accelerator.check_replicas, model))
    if odd:
        net[2].register_parameter("extra", nn.Parameter(torch.zeros(1)))
    return [*found, message(accelerator.check_replicas)], apart


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_weight_that_one_process_changed(size):
    results = run(by_hand, size)
    for found, apart in results:
        assert found[0] is None
        buffers, changed, other = (text for _, text in found[1:])
        assert "1.running_mean" in buffers
        assert "1.num_batches_tracked" not in buffers
        assert changed.startswith("parameters differ between the processes (1 of 6): 2.weight. Compared with")
        assert f"rank 0, the largest difference in 2.weight is {apart:.3g} on rank {size - 1}." in changed
        others = "ranks 0-1" if size > 2 else "rank 0"
        assert f"2.extra: missing on {others}, 'torch.float32 [1]' on rank {size - 1}" in other
        assert other.endswith("Build the same model on every rank.")
    assert all(found == results[0][0] for found, _ in results)


def with_a_weight_changed():
    accelerator = treadle.Accelerator(cpu=True)
    net, model, optimizer = make(accelerator)
    step(accelerator, model, optimizer)  # the first: checked, and fine
    for number in range(2, 8):
        with torch.no_grad():
            net[0].weight += accelerator.process_index * (number == 3)
        if (error := message(step, accelerator, model, optimizer)) is not None:
            return number, error


@pytest.mark.long
@pytest.mark.parametrize(("every", "found"), [("1", 3), ("4", 5), ("0", None)])
def test_a_change_is_found_in_the_next_step_that_is_checked(every, found):
    results = run(with_a_weight_changed, 2, env={**DEBUG, "TREADLE_DEBUG_REPLICAS": every})
    assert results[0] == results[1]
    if found is None:
        assert results[0] is None
        return
    number, (kind, text) = results[0]
    assert (number, kind) == (found, "ReplicasDiffer")
    assert re.match(r"parameters differ between the processes \(1 of 6\): 0.weight\. ", text), text
    assert "Call the model that prepare returned" in text


def without_false_alarm():
    steps = []
    for strategy in (DDP(), DDP(zero=True), "fsdp"):
        accelerator = treadle.Accelerator(cpu=True, strategy=strategy)
        _, model, optimizer = make(accelerator)
        for _ in range(4):
            step(accelerator, model, optimizer)
        steps.append(optimizer.steps_taken)
    accelerator = treadle.Accelerator(cpu=True)
    _, model, optimizer = make(accelerator)
    with treadle.LocalSGD(accelerator, model, local_sgd_steps=3) as local:
        for _ in range(4):
            step(accelerator, model, optimizer)
            local.step()
    accelerator.check_replicas()
    steps.append(optimizer.steps_taken)
    _, model, optimizer = make(accelerator)
    with accelerator.join_uneven_inputs([model]):
        for _ in range(2 + 3 * accelerator.process_index):
            step(accelerator, model, optimizer)
    accelerator.check_replicas()
    return steps


@pytest.mark.long
def test_neither_a_strategy_nor_unequal_steps_give_a_false_alarm():
    assert run(without_false_alarm, 2, env={**DEBUG, "TREADLE_DEBUG_REPLICAS": "1"}) == [[4, 4, 4, 4]] * 2


def test_a_process_alone_has_nothing_to_compare():
    accelerator = treadle.Accelerator(cpu=True)
    make(accelerator)
    with torch.no_grad():
        accelerator.models[0][0].weight.fill_(torch.nan)  # of which no two are equal
    assert message(accelerator.check_replicas) is None
    assert message(lambda: accelerator.check_replicas(buffers=True)) is None
