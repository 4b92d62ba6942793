"""Optimizers that are shared out (ZeRO), and local steps."""

import copy

import pytest
import torch
from support.ddp_loops import Net, inputs, message, sgd, weights
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


def post_local_by_hand(every, start, steps=9):
    """Two workers in one process."""
    nets = [Net(), Net()]
    steppers = [sgd(net) for net in nets]
    trace = []
    for number, step in enumerate(inputs(1, steps), start=1):
        for net, x in zip(nets, step[0], strict=True):
            net.zero_grad()
            net(x).pow(2).mean().backward()
        if number <= start:
            for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
                a.grad = b.grad = (a.grad + b.grad) / 2
        for stepper in steppers:
            stepper.step()
        if number > start and (number - start) % every == 0:
            with torch.no_grad():
                for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
                    mean = (a + b) / 2
                    a.copy_(mean), b.copy_(mean)
        trace.append([weights(net) for net in nets])
    return trace


def test_local_steps_without_a_start_begin_at_once():
    local_steps = DDP(local_sgd_steps=2, local_sgd_start=None).local_steps
    assert local_steps.alone


def post_local(every, start, voting, begin=0, end=9, state=None):
    accelerator = treadle.Accelerator(cpu=True, strategy=DDP(local_sgd_steps=every, local_sgd_start=start))
    net = Net()
    model = accelerator.prepare_model(net, step="training_step" if voting else None)
    optimizer = accelerator.prepare(sgd(net))
    call = accelerator.method(model, "training_step") if voting else lambda x: {"loss": model(x).pow(2).mean()}
    if voting:
        accelerator.accumulation.agree_on_steps(finite=True, at_once=False)
    if state is not None:
        net.load_state_dict(state[0])
        accelerator.strategy.load_optimizer_state(optimizer.optimizer, state[1])
    trace = []
    for number, step in enumerate(inputs(1, 9)):
        if not begin <= number < end:
            continue
        with accelerator.accumulate(model):
            accelerator.accumulation.agreement.stop_vote = number == 7 and accelerator.process_index == 1
            accelerator.backward(call(step[0, accelerator.process_index])["loss"])
        if voting:
            assert accelerator.accumulation.exchange_votes().stop == (number == 7)
        optimizer.step()
        optimizer.zero_grad()
        trace.append(weights(net))
    state = accelerator.get_state_dict(model), accelerator.strategy.optimizer_state(optimizer.optimizer)
    return trace, copy.deepcopy(state), accelerator


def post_locals():
    found = {(k, s, v): post_local(k, s, v)[0] for k in (1, 3) for s in (0, 2) for v in (True, False)}
    _, _, accelerator = post_local(3, 2, False)
    several = message(accelerator.prepare, sgd(Net()))
    _, state, accelerator = post_local(3, 2, True, end=6)  # saved between two averages
    state = accelerator.world.broadcast(state)
    rest, _, _ = post_local(3, 2, True, begin=6, state=state)
    plain = sgd(Net())
    plain.load_state_dict(state[1])
    return found, several, state, rest


@pytest.mark.long
def test_post_local_sgd_is_that_of_two_workers_by_hand():
    ranks = run(post_locals, 2)
    for rank, (found, several, _, _) in enumerate(ranks):
        assert "one optimizer" in several[1]
        for (every, start, _), trace in found.items():
            for ours, wanted in zip(trace, post_local_by_hand(every, start), strict=True):
                torch.testing.assert_close(ours, wanted[rank], rtol=1e-12, atol=1e-12)
    # Between averages a checkpoint is the average, and the run that is resumed meets when the other would have.
    (_, _, state, rest), (_, _, _, other) = ranks
    both = post_local_by_hand(3, 2)[5]
    torch.testing.assert_close(torch.cat([v.flatten() for v in state[0].values()]), (both[0] + both[1]) / 2)
    assert [torch.equal(a, b) for a, b in zip(rest, other, strict=True)] == [False, True, False]
