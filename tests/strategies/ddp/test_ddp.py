"""DDP's options against loops written by hand in one process, in float64."""

import itertools

import pytest
import torch
from support.ddp_loops import POWER, STEPS, TOKENS, Net, by_hand, inputs, message, sgd, trained, weights
from support.models import Line
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from treadle.strategies import DDP

import treadle


class Twice(Net):
    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=True)
        return checkpoint(self.first, x[:, :3], use_reentrant=True)


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


@pytest.mark.long
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
    "own": ({"local_sgd_steps": 4}, TypeError, "'local_sgd_steps'. Use treadle.LocalSGD in your own loop"),
    "local": ({"model_averaging_period": 4}, TypeError, "Use treadle.LocalSGD in your own loop"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    arguments, kind, words = WRONG[case]
    with pytest.raises(kind, match=words):
        DDP(**arguments)


def test_one_process_says_what_changes_nothing(capsys):
    treadle.Accelerator(cpu=True, strategy=DDP(zero=True, comm_hook="bf16"))
    assert "without effect with a world size of 1: DDP's comm_hook and zero=True" in capsys.readouterr().err


# -- errors of the reducer -------------------------------------------------------------------------------------------


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


# -- compression -----------------------------------------------------------------------------------------------------


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


# -- going on ----------------------------------------------------------------------------------------------------------


class Crossed(nn.Module):
    """Its parts are used in another order than they were made, so torch lays its gradients out anew after one step."""

    def __init__(self):
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(133, 7), nn.Linear(133, 133), nn.Linear(21, 133)

    def forward(self, x):
        return self.last(self.middle(self.first(x).relu()).relu())


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
        task = Line()
        task.net = Crossed()
        saver = treadle.Callback()
        if path is None:
            saver.on_step_end = lambda trainer, _: trainer.save_checkpoint(root / f"fit{trainer.global_step}")
        make_trainer(strategy="ddp", callbacks=saver).fit(
            task, DataLoader(TensorDataset(torch.randn(60, 21)), 4), ckpt_path=path
        )
        return weights(task)

    found["trainer"] = [fit(path) for path in (None, *(root / f"fit{step}" for step in (1, 2, 3)))]
    return found


@pytest.mark.long
@pytest.mark.guarantee
def test_from_three_processes_on_a_resumed_run_adds_up_in_the_same_order(tmp_path):
    for rank in run(by_three, 3, tmp_path):
        for door, (whole, *resumed) in rank.items():
            assert [torch.equal(one, whole) for one in resumed] == [True, True, True], door
