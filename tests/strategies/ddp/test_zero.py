"""Optimizers that are shared out (ZeRO)."""

import copy

import pytest
import torch
from support.ddp_loops import message, sgd, weights
from support.processes import run
from torch import nn
from treadle.strategies import DDP

import treadle


def wide():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 1))


OPTIMIZERS = {
    "adamw": lambda net: torch.optim.AdamW(
        [{"params": net[0].parameters(), "lr": 0.01, "weight_decay": 0.3}, {"params": [*net[2:].parameters()]}], lr=0.05
    ),
    "sgd": sgd,
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=0.05),
    "adafactor": lambda net: torch.optim.Adafactor(net.parameters(), lr=0.05),
}


def state_bytes(optimizer):
    tensors = [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors if t.ndim)


def wide_run(strategy, optimizer, state=None, steps=4, closure=False):
    """Trains; a scheduler was made before `prepare`. Returns weights, own bytes, whole state, learning rates."""
    accelerator = treadle.Accelerator(cpu=True, strategy=strategy)
    net = wide()
    stepper = OPTIMIZERS[optimizer](net)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(stepper, 0.5)
    model, prepared, scheduler = accelerator.prepare(net, stepper, scheduler)
    if state is not None:
        net.load_state_dict(state["model"])
        accelerator.strategy.load_optimizer_state(stepper, copy.deepcopy(state["optimizer"]))
    x = torch.randn(steps, 2, 5, 6, generator=torch.Generator().manual_seed(9))[:, accelerator.process_index]

    def loss(batch):
        prepared.zero_grad()
        value = model(batch).pow(2).mean()
        accelerator.backward(value)
        return value

    for batch in x:
        with accelerator.accumulate(model):
            if closure:
                prepared.step(lambda batch=batch: loss(batch))
            else:
                loss(batch)
                prepared.step()
            scheduler.step()
    parts = accelerator.world.gather_objects(accelerator.strategy.optimizer_state(stepper))
    slots = {index: entry for part in parts for index, entry in part["state"].items()}
    whole = {**parts[0], "state": {index: slots[index] for index in sorted(slots)}}
    return {
        "weights": weights(net),
        "bytes": state_bytes(stepper),
        "state": {"model": net.state_dict(), "optimizer": copy.deepcopy(whole)},
        "lr": [group["lr"] for group in stepper.param_groups],
        "whole": [len(group["params"]) for group in stepper.param_groups],
    }


def shared_states():
    world = treadle.Accelerator(cpu=True).world
    found = {}
    for name in OPTIMIZERS:
        plain, zero = wide_run(DDP(), name), wide_run(DDP(zero=True), name)
        from_zero, from_plain = (world.broadcast(run["state"]) for run in (zero, plain))
        found[name] = (
            plain,
            zero,
            wide_run(DDP(), name, from_plain),
            wide_run(DDP(), name, from_zero),
            wide_run(DDP(zero=True), name, from_plain),
            wide_run(DDP(zero=True), name, from_zero),
            wide_run(DDP(zero=True), name, closure=True),
        )
    return found


def same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.long
def test_zero_trains_alike_with_part_of_the_state():
    first, second = run(shared_states, 2)
    for name in OPTIMIZERS:
        for rank, found in enumerate((first[name], second[name])):
            plain, zero, *resumed, closure = found
            same(zero["weights"], plain["weights"])
            same(closure["weights"], plain["weights"])
            assert zero["lr"] == plain["lr"]
            assert zero["whole"] == plain["whole"]
            for other in resumed[1:]:
                same(other["weights"], resumed[0]["weights"])
            if rank == 0:
                same(zero["state"]["optimizer"], plain["state"]["optimizer"])
                assert list(zero["state"]["optimizer"]["state"]) == list(plain["state"]["optimizer"]["state"])
        parts = [found[name][1]["bytes"] for found in (first, second)]
        assert sum(parts) == first[name][0]["bytes"]
        if name != "adafactor":  # what it keeps is not of the parameters' size
            assert max(parts) < 0.8 * first[name][0]["bytes"]


def late_changes():
    """State from before `prepare`, parameters that are frozen, and a group that comes later."""
    ends = []
    for zero in (False, True):
        accelerator = treadle.Accelerator(cpu=True, strategy=DDP(zero=zero))
        net = wide()
        net[2].bias.requires_grad_(False)
        optimizer = torch.optim.Adam(list(net[:4].parameters()), lr=0.05)
        net(torch.ones(1, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        before = state_bytes(optimizer)
        model, prepared = accelerator.prepare(net, optimizer)
        assert (state_bytes(optimizer) < before) == zero
        for step in range(4):
            if step == 2:
                prepared.add_param_group({"params": net[4].parameters(), "lr": 0.5})
            model(torch.full((2, 6), 0.1 * step + accelerator.process_index)).pow(2).mean().backward()
            prepared.step()
            net.zero_grad()
        ends.append(weights(net))
    lbfgs = message(accelerator.prepare, torch.optim.LBFGS(net.parameters()))
    return ends, lbfgs


def test_zero_takes_up_state_and_later_groups():
    for (plain, zero), lbfgs in run(late_changes, 2):
        same(zero, plain)
        assert "LBFGS" in lbfgs[1]
