"""DDP's options against loops written by hand in one process, in float64."""

import copy
import itertools

import pytest
import torch
from support.processes import run
from support.trainers import NO_OUTPUT
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from treadle.strategies import DDP

import treadle

ROWS, STEPS = 5, 4


class Net(nn.Module):
    def __init__(self, extra=False):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(3, 4).double()
        self.last = nn.Linear(4, 1).double()
        if extra:
            self.extra = nn.Linear(4, 2).double()

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))

    def training_step(self, batch):
        return {"loss": self(batch).pow(2).mean(), "other": [batch]}


class Twice(Net):
    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=True)
        return checkpoint(self.first, x[:, :3], use_reentrant=True)


def inputs(k, steps=STEPS):
    """[step, micro-batch, rank, row, column]"""
    return torch.randn(steps, k, 2, ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def by_hand(k, extra=False, tokens=None, optimizer=sgd):
    """One process; with `tokens`, each rank's micro-batch weighs that many."""
    model = Net(extra)
    stepper = optimizer(model)
    for step in inputs(k):
        stepper.zero_grad()
        for micro, rank in itertools.product(range(k), range(2)):
            share = 1 / (2 * k) if tokens is None else tokens[rank] / (k * sum(tokens))
            (model(step[micro, rank]).pow(2).mean() * share).backward()
        stepper.step()
    return weights(model)


def trained(strategy, k, extra=False, voting=True, tokens=None, optimizer=sgd):
    """The same over two processes, through the task's step and its ballot, or by hand."""
    accelerator = treadle.Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=k)
    net = Net(extra)
    model = accelerator.prepare_model(net, step="training_step" if voting else None)
    stepper = accelerator.prepare(optimizer(net))
    rank = accelerator.process_index
    call = accelerator.method(model, "training_step") if voting else lambda x: {"loss": model(x).pow(2).mean()}
    if voting:
        accelerator.accumulation.agree_on_steps(finite=True, at_once=False)
    summed = []
    for step in inputs(k):
        for micro in range(k):
            with accelerator.accumulate(model):
                loss = call(step[micro, rank])["loss"]
                accelerator.backward(loss, weight=None if tokens is None else tokens[rank])
        if voting:
            start = accelerator.accumulation.agreement.count
            accelerator.accumulation.agreement.count = lambda start=start: summed.append(start()) or summed[-1]
            accelerator.accumulation.agreement.stop_vote = False
            assert accelerator.accumulation.exchange_votes().finite
            del accelerator.accumulation.agreement.count
        stepper.step()
        stepper.zero_grad()
    return weights(net), [float(s) for s in summed]


def trained_manually(k):
    """The same, but gradients are averaged before the steps only, beside a model whose backward passes do so."""
    accelerator = treadle.Accelerator(cpu=True, strategy="ddp", gradient_accumulation_steps=k)
    net = Net()
    model = accelerator.prepare_model(net, manual_optimization=True)
    stepper = accelerator.prepare(sgd(net))
    if k == 1:
        table = nn.Embedding(4, 1, sparse=True)
        beside, other = accelerator.prepare(table, torch.optim.SGD(table.parameters(), lr=0.1))
        accelerator.backward(beside(torch.tensor([accelerator.process_index])).sum())
        other.step()  # sparse gradients cannot be averaged before a step
    forward = accelerator.local_method(model, "forward")
    for step in inputs(k):
        for micro in range(k):
            with accelerator.accumulate(model):
                accelerator.backward(forward(step[micro, accelerator.process_index]).pow(2).mean())
        stepper.step()
        stepper.zero_grad()
    return weights(net)


@pytest.mark.parametrize("k", [1, 3])
def test_in_a_loop_with_manual_optimization_the_step_averages_the_gradients(k):
    expected = by_hand(k)
    for found in run(trained_manually, 2, k):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


# -- torch's own options ---------------------------------------------------------------------------------------------

OPTIONS = {
    "static": {"static_graph": True},
    "static-views": {"static_graph": True, "gradient_as_bucket_view": True},
    "views": {"gradient_as_bucket_view": True},
    "small-buckets": {"bucket_cap_mb": 1e-4},
    "no-buffers": {"broadcast_buffers": False},
    "unused": {"find_unused_parameters": True},
    "unused-views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}
TOKENS = (100_003, 77)


def all_options():
    found = {}
    for name, k, voting, extra in itertools.product(OPTIONS, (1, 4), (True, False), (False, True)):
        if extra and "static" not in name and "unused" not in name:
            continue
        found[name, k, voting, extra] = trained(DDP(**OPTIONS[name]), k, extra, voting)[0]
    for name, k in itertools.product(OPTIONS, (1, 4)):
        found[name, k, "tokens"] = trained(DDP(**OPTIONS[name]), k, tokens=TOKENS)
    return found


def test_every_option_trains_as_one_process_does():
    for found in run(all_options, 2):
        for case, value in found.items():
            if case[-1] == "tokens":
                model, summed = value
                assert summed == [sum(TOKENS) * case[1]] * STEPS, case
                torch.testing.assert_close(model, by_hand(case[1], tokens=TOKENS), rtol=1e-12, atol=1e-12)
            else:
                torch.testing.assert_close(value, by_hand(case[1], case[3]), rtol=1e-12, atol=1e-12, msg=str(case))


WRONG = {
    "unknown": ({"static_grap": True}, TypeError, "Did you mean 'static_graph'"),
    "size": ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb=0"),
    "hook": ({"comm_hook": "bf61"}, ValueError, "Did you mean 'bf16'"),
    "batched": ({"comm_hook": "batched_power_sgd"}, ValueError, "broken in torch"),
    "state": ({"comm_state": {"a": 1}}, ValueError, "comm_hook"),
    "twice": ({"comm_hook": "bf16", "ddp_comm_hook": "fp16"}, ValueError, "another name for comm_hook"),
    "bf16-state": ({"comm_hook": "bf16", "comm_state": {"rank": 1}}, ValueError, "no state"),
    "local-zero": ({"local_sgd_steps": 2, "zero": True}, ValueError, "can't be combined with zero=True"),
    "local-hook": ({"local_sgd_steps": 2, "comm_hook": "bf16"}, ValueError, "can't be combined with comm_hook"),
    "local-static": ({"local_sgd_steps": 2, "static_graph": True}, ValueError, "can't be combined with static_graph"),
    "local-none": ({"local_sgd_start": 2}, ValueError, "needs local_sgd_steps"),
    "local-0": ({"model_averaging_period": 0}, ValueError, "local_sgd_steps=0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    arguments, kind, words = WRONG[case]
    with pytest.raises(kind, match=words):
        DDP(**arguments)


def test_a_loss_scale_of_each_process_contradicts_local_steps():
    with pytest.raises(ValueError, match="loss scale"):
        treadle.Accelerator(cpu=True, strategy=DDP(local_sgd_steps=2), mixed_precision="fp16")


def test_one_process_says_what_changes_nothing(capsys):
    treadle.Accelerator(cpu=True, strategy=DDP(zero=True, comm_hook="bf16"))
    assert "DDP's comm_hook and zero=True have no effect" in capsys.readouterr().err


# -- errors of the reducer -------------------------------------------------------------------------------------------


def message(function, *args):
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def stuck(voting, **options):
    """A parameter without a gradient, in the only step of a run."""
    return message(lambda: trained(DDP(**options), 1, True, voting))


def stuck_in_the_next_forward():
    accelerator = treadle.Accelerator(cpu=True, strategy="ddp")
    model = accelerator.prepare(Net(True))
    x = inputs(1)[0, 0, accelerator.process_index]
    model(x).sum().backward()
    return message(model, x)


def ready_twice():
    accelerator = treadle.Accelerator(cpu=True, strategy="ddp")
    model = accelerator.prepare(Twice())
    loss = model(inputs(1)[0, 0, 0].requires_grad_()).sum()
    try:
        loss.backward()
    except RuntimeError as error:
        better, other = accelerator.strategy.explain(error), RuntimeError("of the user's own")
        assert accelerator.strategy.explain(other) is other
        return type(better).__name__, str(better)


def own_error():
    accelerator = treadle.Accelerator(cpu=True, strategy="ddp")
    return message(accelerator.prepare(Net()), torch.ones(2, 5).double())


def errors():
    return {
        "voting": stuck(True),
        "loop": stuck(False),
        "forward": stuck_in_the_next_forward(),
        "no fix needed": stuck(True, find_unused_parameters=True),
        "twice": ready_twice(),
        "own": own_error(),
    }


def test_errors_of_the_reducer_name_parameters_and_fix():
    for found in run(errors, 2):
        for case in ("voting", "loop", "forward"):
            kind, text = found[case]
            assert kind == "ValueError"
            assert "extra.weight, extra.bias." in text
            assert "first" not in text
            assert "strategy='ddp_find_unused_parameters_true'" in text
            assert "DDP(find_unused_parameters=True)" in text
            assert "loss" in text
        assert found["no fix needed"] is None
        kind, text = found["twice"]
        assert kind == "ValueError"
        assert "gradient of first." in text
        assert "use_reentrant=False" in text
        assert "static_graph=True" in text
        assert found["own"][0] == "RuntimeError"
        assert "shapes cannot be multiplied" in found["own"][1]


class Task(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = Net(True)

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        return sgd(self)


def one_step_of_a_trainer(strategy):
    trainer = treadle.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    return message(trainer.fit, Task(), torch.utils.data.DataLoader(list(inputs(1)[0, 0].flatten(0, 1)), 5))


def trainers():
    return [one_step_of_a_trainer(name) for name in ("ddp", "ddp_find_unused_parameters_true")]


def test_the_trainer_names_them_in_the_very_step():
    for first, second in run(trainers, 2):
        assert first[0] == "ValueError"
        assert "net.extra.weight, net.extra.bias" in first[1]
        assert second is None


# -- compression -----------------------------------------------------------------------------------------------------


POWER = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "min_compression_rate": 0.1}


def doubled(state, bucket):
    """A hook of the user's: the mean gradient, twice."""
    state.append(bucket.index())
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def hooks():
    seen = []
    cases = {
        "fp16": {"comm_hook": "fp16"},
        "bf16": {"comm_hook": "bf16"},
        "power": {"comm_hook": "power_sgd", "comm_state": POWER},
        "wrapped": {"ddp_comm_hook": "power_sgd", "comm_state_option": POWER, "ddp_comm_wrapper": "bf16"},
        "own": {"ddp_comm_hook": doubled, "ddp_comm_state": seen},
    }
    found = {}
    for (name, options), k in itertools.product(cases.items(), (1, 4)):
        found[name, k] = trained(DDP(**options), k), trained(DDP(**options), k, tokens=TOKENS)
    return found, len(seen)


def test_compression_leaves_votes_exact_and_training_near():
    for found, calls in run(hooks, 2):
        assert calls > 0
        for (name, k), ((plain, _), (weighted, summed)) in found.items():
            assert summed == [sum(TOKENS) * k] * STEPS, name
            if name != "own":
                near = {"fp16": 2e-4, "wrapped": 5e-3}.get(name, 2e-3)  # weights move by 0.23
                assert (plain - by_hand(k)).abs().max() < near, (name, k)
                assert (weighted - by_hand(k, tokens=TOKENS)).abs().max() < near, (name, k)
                assert not torch.equal(plain, by_hand(k))
            else:
                twice = by_hand(k, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
                torch.testing.assert_close(plain, twice, rtol=1e-12, atol=1e-12)


def late_reduction():
    """Forwards in no_sync, and a backward that reduces all the same; and what comes after it."""
    accelerator = treadle.Accelerator(cpu=True, strategy="ddp")
    net = Net()
    model = accelerator.prepare(net)
    x = inputs(1, 2)[:, 0, accelerator.process_index]
    strategy = accelerator.strategy
    found = []
    for _ in range(2):
        with strategy.no_sync(model):
            loss = model(x[0]).pow(2).mean()
            strategy.set_gradient_sync(model, True)  # without effect in here
            model(x[1]).pow(2).mean().backward()
        found.append(net.first.weight.grad.clone())
        with strategy.sync_in_backward(model):
            loss.backward()
        found.append(net.first.weight.grad.clone())
        net.zero_grad()
    power = treadle.Accelerator(cpu=True, strategy=DDP(comm_hook="power_sgd", comm_state=dict(POWER)))
    model = power.prepare(Net())
    for _ in range(4):  # gradients that are all zero
        model(torch.zeros(2, 3).double()).mul(0).sum().backward()
    return found, [bool(p.grad.isfinite().all()) for p in model.parameters()]


def test_reduction_on_demand_and_gradients_of_zero():
    (first, fine), (second, _) = run(late_reduction, 2)
    net = Net()
    for x in inputs(1, 2).flatten(0, 1).flatten(0, 1):
        (net(x).pow(2).mean() / 2).backward()
    assert all(fine)
    for i in (0, 2):
        assert not torch.equal(first[i], second[i])
        torch.testing.assert_close(first[i + 1], second[i + 1], rtol=0, atol=0)
        torch.testing.assert_close(first[i + 1], net.first.weight.grad, rtol=1e-12, atol=1e-12)


class Middle(nn.Sequential):
    def forward(self, x):
        return self[1](x)


def add_to_the_middle():
    """Return the gradients of two backward passes, the second of which reaches only a parameter in the middle."""
    found = []
    for kind, find_unused in ((nn.Sequential, False), (Middle, True)):
        accelerator = treadle.Accelerator(cpu=True, strategy=DDP(find_unused_parameters=find_unused))
        net = kind(*(nn.Linear(1, 1) for _ in range(3)))
        for parameter in net.parameters():
            nn.init.ones_(parameter)
        model = accelerator.prepare(net)
        x = torch.full((1, 1), 1.0 + accelerator.process_index)
        accelerator.backward(model(x).sum())
        accelerator.backward(net[1].weight.sum() * x.sum())
        found.append(net[1].weight.grad.item())
    return found


def test_a_second_backward_pass_that_reaches_few_parameters():
    assert run(add_to_the_middle, 2) == [[2.5 + 1.5, 1.5 + 1.5]] * 2


# -- BatchNorm -------------------------------------------------------------------------------------------------------

SHARES = {"uneven": (3, 6), "single": (1, 8), "even": (4, 4), "none": (0, 5)}


def normed(shape, **options):
    torch.manual_seed(2)
    norm = nn.BatchNorm1d(3, **options) if len(shape) == 1 else nn.BatchNorm2d(3, **options)
    return nn.Sequential(nn.Identity(), norm, nn.Tanh()).double()


def images(rows, shape):
    return torch.randn(rows, 3, *shape[1:], dtype=torch.float64, generator=torch.Generator().manual_seed(8)) * 3 + 1


def one_norm(model, x, weight, total):
    x = x.clone().requires_grad_()
    seen = []
    for _ in range(2):
        y = model(x)
        (y * weight).sum().div(total).backward()
        seen.append(y.detach())
    state = {name: value.clone() for name, value in getattr(model, "module", model).state_dict().items()}
    model.eval()
    late = model(x).detach() if model[1].track_running_stats else None  # else of this process's batch
    return seen, x.grad, state, [p.grad for p in model.parameters()], late


NORMS = {
    "plain": ((1,), {}),
    "images": ((1, 2, 4), {}),
    "bare": ((1,), {"affine": False}),
    "cumulative": ((1,), {"momentum": None}),
    "untracked": ((1,), {"track_running_stats": False}),
}


def norms():
    found = {}
    for (name, (shape, options)), (share, rows) in itertools.product(NORMS.items(), SHARES.items()):
        accelerator = treadle.Accelerator(cpu=True, strategy=DDP(sync_batchnorm=True))
        net = nn.Sequential(normed(shape, **options), nn.Flatten(), nn.Linear(1, 1))  # a parameter in any case
        names = list(net.state_dict())
        accelerator.prepare(net)
        assert list(net.state_dict()) == names
        copy.deepcopy(net)
        rank = accelerator.process_index
        x = images(sum(rows), shape).split(rows)[rank]
        weight = images(sum(rows), shape).sin().split(rows)[rank]
        found[name, share] = one_norm(net[0], x, weight, 1.0)
    return found


def test_batch_norm_over_all_processes():
    first, second = run(norms, 2)
    for (name, share), one in first.items():
        shape, options = NORMS[name]
        x = images(sum(SHARES[share]), shape)
        outputs, to_x, state, to_parameters, late = one_norm(normed(shape, **options), x, x.sin(), 1.0)
        two = second[name, share]
        exact = {"rtol": 1e-10, "atol": 1e-12}
        for i in range(2):
            torch.testing.assert_close(torch.cat([one[0][i], two[0][i]]), outputs[i], **exact)
        torch.testing.assert_close(torch.cat([one[1], two[1]]), to_x, **exact)
        for part in (one, two):
            torch.testing.assert_close(part[2], state, **exact)
        torch.testing.assert_close([a + b for a, b in zip(one[3], two[3], strict=True)], to_parameters, **exact)
        if name != "untracked":
            torch.testing.assert_close(torch.cat([one[4], two[4]]), late, **exact)


class OwnNorm(nn.BatchNorm1d):
    pass


def odd_norms():
    words = []
    for net in (nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2), OwnNorm(2))):
        strategy = DDP(sync_batchnorm=True)
        words.append(message(treadle.Accelerator(cpu=True, strategy=strategy).prepare, net)[1])
    return words


def test_batch_norms_that_can_not_be_replaced():
    for whole, own in run(odd_norms, 2):
        assert "inside a module" in whole
        assert "layer '1' is an OwnNorm" in own


# -- ZeRO ------------------------------------------------------------------------------------------------------------


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


# -- post-local SGD --------------------------------------------------------------------------------------------------


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


# -- going on ----------------------------------------------------------------------------------------------------------


class Crossed(nn.Module):
    """Its parts are used in another order than they were made, so torch lays its gradients out anew after one step."""

    def __init__(self):
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(133, 7), nn.Linear(133, 133), nn.Linear(21, 133)

    def forward(self, x):
        return self.last(self.middle(self.first(x).relu()).relu())


class CrossedTask(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = Crossed()

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def by_three(root):
    """Weights at the end, of a run and of those that go on from its first steps, in both doors."""
    found = {}
    for zero in (False, True):
        accelerator = treadle.Accelerator(cpu=True, strategy=DDP(zero=zero))

        def train(begin, root, accelerator=accelerator):
            accelerator.free_memory()
            torch.manual_seed(0)
            net = Crossed()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            model, optimizer = accelerator.prepare(net, optimizer)
            if begin:
                accelerator.load_state(root / str(begin))
            for number in range(begin, 5):
                seed = torch.Generator().manual_seed(9 * number + accelerator.process_index)
                accelerator.backward(model(torch.randn(5, 21, generator=seed)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if not begin:
                    accelerator.save_state(root / str(number + 1))
            return weights(net)

        found["zero" if zero else "loop"] = [train(begin, root / str(zero)) for begin in (0, 1, 2, 3)]

    def fit(path=None):
        treadle.seed_everything(0)
        task = CrossedTask()
        saver = treadle.Callback()
        if path is None:
            saver.on_step_end = lambda trainer, _: trainer.save_checkpoint(root / f"fit{trainer.global_step}")
        one = treadle.Trainer(accelerator="cpu", strategy="ddp", max_epochs=1, callbacks=saver, **NO_OUTPUT)
        one.fit(task, DataLoader(TensorDataset(torch.randn(60, 21)), 4), ckpt_path=path)
        return weights(task)

    found["trainer"] = [fit(path) for path in (None, *(root / f"fit{step}" for step in (1, 2, 3)))]
    return found


@pytest.mark.guarantee
def test_from_three_processes_on_a_resumed_run_adds_up_in_the_same_order(tmp_path):
    for rank in run(by_three, 3, tmp_path):
        for door, (whole, *resumed) in rank.items():
            assert [torch.equal(one, whole) for one in resumed] == [True, True, True], door
