"""What is computed again in backward: how often each block runs, and how many products there are."""

import logging
import shutil

import pytest
import torch
import torch._functorch.config as settings
from support.models import SGDTask
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
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


class Task(SGDTask):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.ModuleDict(
            {"first": nn.Linear(4, 4), "blocks": nn.ModuleList(Block() for _ in range(4)), "last": nn.Linear(4, 1)}
        )

    def training_step(self, batch, batch_idx):
        x = self.net["first"](batch)
        for block in self.net["blocks"]:
            x = block(x)
        return self.net["last"](x).square().mean()


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is mm
        return func(*args, **(kwargs or {}))


def fit(policy, task=None, **flags):
    task, products = task or Task(), Products()
    trainer = make_trainer(strategy=FSDP(activation_checkpointing_policy=policy), **flags)
    with products:
        trainer.fit(task, DataLoader(torch.ones(2, 4), batch_size=2))
    weights = [parameter.full_tensor() for parameter in task.parameters()]
    return [block.calls for block in task.net["blocks"]], products.count, weights


PLAIN = 4 * 2 * 3 + 2  # two products in each block's forward, four in its backward; `first` and `last` add theirs


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


def test_blocks_that_are_not_there():
    with pytest.raises(ValueError, match="names Conv2d, but Task has no module of this class"):
        fit(Recompute(blocks={"Conv2d"}))


def test_a_budget_is_for_compiled_models():
    with pytest.raises(ValueError, match=r"Recompute\(budget=0.5\) needs a compiled model, but Task is not compiled"):
        fit(Recompute(budget=0.5))


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
        trainer.fit(Task(), DataLoader(torch.ones(4, 4), batch_size=2))
        found.append(trainer.decided)
    return found


@pytest.mark.long
def test_what_gathering_costs_is_said_with_the_choice():
    advice = "in the storage dtype; FSDP(gather_dtype=torch.bfloat16) sends half"
    for decided, chosen in run(gathered, 2):
        assert f"GiB in each forward and backward pass, {advice}" in decided
        assert "gather_dtype" not in chosen
