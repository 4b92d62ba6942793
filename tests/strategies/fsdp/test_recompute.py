"""What is computed again in backward: how often each block runs, and how many products there are."""

import logging
import shutil

import pytest
import torch
import torch._functorch.config as settings
from support.models import Line, loader
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from treadle.strategies import FSDP, Recompute

mm = torch.ops.aten.mm.default


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.down(torch.tanh(self.up(x)))


def build():
    torch.manual_seed(0)
    task = Line()
    task.net = nn.Sequential(nn.Linear(4, 4), *(Block() for _ in range(4)), nn.Linear(4, 1))
    return task


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is mm
        return func(*args, **(kwargs or {}))


def fit(policy, **flags):
    task, products = build(), Products()
    trainer = make_trainer(strategy=FSDP(activation_checkpointing_policy=policy), **flags)
    with products:
        trainer.fit(task, loader(2, 2, 4))
    weights = [parameter.full_tensor() for parameter in task.parameters()]
    return [block.calls for block in task.net[1:-1]], products.count, weights


@pytest.mark.parametrize(
    ("policy", "calls", "again"),
    [
        (None, [1, 1, 1, 1], 0),
        (True, [2, 2, 2, 2], 8),
        (Recompute(), [2, 2, 2, 2], 8),
        (Recompute(every=2), [2, 1, 2, 1], 4),
        (Recompute(every=3), [2, 1, 1, 2], 4),
        (Recompute(blocks={Block}, every=4), [2, 1, 1, 1], 2),
        (Recompute(keep="products"), [2, 2, 2, 2], 0),
        (Recompute(keep=[mm], every=2), [2, 1, 2, 1], 0),
        (Recompute(keep=[torch.ops.aten.tanh.default]), [2, 2, 2, 2], 8),
    ],
    ids=str,
)
def test_what_is_computed_again(policy, calls, again):
    _, plain, expected = fit(None)
    found_calls, products, weights = fit(policy)
    assert found_calls == calls
    # The last product of a block is not needed for its gradients, and torch stops before it.
    assert plain <= products <= plain + again
    assert products > plain or not again
    assert all(map(torch.equal, weights, expected))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"every": 0}, ValueError, "every=0"),
        ({"keep": "prodcuts"}, ValueError, "keep='prodcuts' must be 'products'"),
        ({"keep": ["mm"]}, TypeError, "keep contains 'mm', but must contain only operations"),
        ({"budget": "0.5"}, TypeError, "budget='0.5' must be a number, not a str"),
        ({"budget": 1.5}, ValueError, "budget=1.5 must be a fraction"),
        ({"budget": 0.5, "every": 2}, ValueError, "budget=0.5 can't be combined with every=.*Pass budget alone"),
        ({"blocks": "atuo"}, ValueError, "Did you mean 'auto'"),
    ],
)
def test_wrong_arguments(options, error, says):
    with pytest.raises(error, match=says):
        Recompute(**options)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (Recompute(blocks={"Conv2d"}), "names Conv2d, but Line has no module of this class"),
        (Recompute(budget=0.5), r"Recompute\(budget=0.5\) needs a compiled model, but Line is not compiled"),
    ],
    ids=["blocks", "budget"],
)
def test_policies_that_do_not_fit_the_model(policy, says):
    with pytest.raises(ValueError, match=says):
        fit(policy)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="inductor needs a C++ compiler")
def test_a_budget_is_the_compilers(monkeypatch):
    monkeypatch.setattr(settings, "activation_memory_budget", 1.0)
    _, _, expected = fit(None)
    _, _, weights = fit(Recompute(budget=0.5), compile={"backend": "aot_eager"})
    assert settings.activation_memory_budget == 0.5
    for found, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def gathered():
    logging.getLogger("treadle").setLevel(logging.ERROR)
    found = []
    for gather_dtype in (None, torch.bfloat16):
        trainer = make_trainer(precision="bf16-mixed", strategy=FSDP(gather_dtype=gather_dtype))
        trainer.fit(build(), loader(4, 2, 4))
        found.append(trainer.decided)
    return found


@pytest.mark.long
def test_what_gathering_costs_is_said_with_the_choice():
    advice = "in the storage dtype; FSDP(gather_dtype=torch.bfloat16) sends half"
    for decided, chosen in run(gathered, 2):
        assert f"GiB in each forward and backward pass, {advice}" in decided
        assert "gather_dtype" not in chosen
