"""Limits of gradients by the names of a task's parts, against torch's own functions on these parts."""

from functools import partial

import pytest
import torch
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.compat.utilities import GradClipAlgorithmType
from treadle.strategies import DDP, FSDP

import treadle

LIMITS = {"backbone": 0.5, "backbone.1.bias": 0.05, "head": 0.1}
FLAGS = {"max_epochs": 2, "precision": "64-true", "accumulate_grad_batches": 2}


def data():
    return torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Net(treadle.TaskModule):
    count = 1  # of optimizers

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 1)
        self.other = nn.Linear(1, 1)
        self.double()

    def training_step(self, batch, batch_idx):
        return (self.other(self.head(self.backbone(batch[0].to(self.dtype)).tanh())) - 3).square().mean()

    def configure_optimizers(self):
        parameters = list(self.parameters())
        half = len(parameters) // self.count  # which cuts through the backbone
        parts = [parameters] if self.count == 1 else [parameters[:half], parameters[half:]]
        return [torch.optim.SGD(part, lr=0.5) for part in parts]


class Two(Net):
    count = 2


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx) / 2)
        if batch_idx % 2 or self.trainer.is_last_batch:
            self.clip_gradients(optimizer, LIMITS | {"*": 0.02})
            optimizer.step()
            optimizer.zero_grad()


def fit(kind, limits, processes=1, **flags):
    task = kind()
    trainer = make_trainer(**FLAGS | {"gradient_clip_val": limits, "devices": processes} | flags)
    trainer.fit(task, DataLoader(TensorDataset(data()), 5 if processes == 1 else 2))
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in task.parameters()]


def by_hand(limits, batch=10, clip=nn.utils.clip_grad_norm_, accumulate=1):
    task = Net()
    (optimizer,) = Net.configure_optimizers(task)
    bias = task.backbone[1].bias
    parts = {
        "backbone": [p for p in task.backbone.parameters() if p is not bias],
        "backbone.1.bias": [bias],
        "head": list(task.head.parameters()),
        "*": list(task.other.parameters()),
    }
    for _ in range(2):
        batches = data().split(batch)
        for index, x in enumerate(batches):
            (task.training_step([x], 0) / accumulate).backward()
            if (index + 1) % accumulate == 0 or index + 1 == len(batches):
                for name, limit in limits.items():
                    clip(parts[name], limit)
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach() for p in task.parameters()]


def assert_close(found, right, **tolerance):
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, **tolerance or {"rtol": 1e-10, "atol": 1e-12})


class Asks(Net):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val, GradClipAlgorithmType("value"))


def test_the_algorithm_as_lightnings_enum():
    expected = fit(Net, 0.01, gradient_clip_algorithm="value")
    assert_close(fit(Net, 0.01, gradient_clip_algorithm=GradClipAlgorithmType.VALUE), expected)
    assert_close(fit(Asks, 0.01), expected)


@pytest.mark.parametrize("kind", [Net, Two])
def test_each_part_has_its_own_norm(kind):
    assert_close(fit(kind, LIMITS), by_hand(LIMITS))
    limits = {**LIMITS, "*": 0.02}
    assert_close(fit(kind, limits), by_hand(limits))
    assert_close(fit(kind, {"backbone": None, **dict.fromkeys(("head", "*"), 0.1)}), by_hand({"head": 0.1, "*": 0.1}))
    by_value = nn.utils.clip_grad_value_
    assert_close(fit(kind, LIMITS, gradient_clip_algorithm="value"), by_hand(LIMITS, clip=by_value))


def test_float16_clips_gradients_without_the_scale():
    assert_close(fit(Net, LIMITS, precision="16-mixed"), by_hand(LIMITS), rtol=0.02, atol=0.002)


def on_two_processes():
    found = {}
    for name, make in {"ddp": DDP, "zero": partial(DDP, zero=True), "fsdp": FSDP}.items():
        for kind in (Net, Two):
            found[name, kind.__name__] = fit(kind, LIMITS, 2, strategy=make())
        found[name, "value"] = fit(Net, LIMITS, 2, strategy=make(), gradient_clip_algorithm="value")
        found[name, "manual"] = fit(Manual, None, 2, strategy=make(), accumulate_grad_batches=1)
    return found


@pytest.mark.long
def test_two_processes():
    right = {
        **dict.fromkeys(("Net", "Two"), by_hand(LIMITS, 8)),
        "value": by_hand(LIMITS, 8, nn.utils.clip_grad_value_),
        "manual": by_hand({**LIMITS, "*": 0.02}, 4, accumulate=2),
    }
    for rank in run(on_two_processes, 2):
        for (_, kind), found in rank.items():
            assert_close(found, right[kind])


def test_a_name_that_no_parameter_has():
    with pytest.raises(ValueError, match=r"a limit for 'bakbone', but Net has no parameter .* Did you mean 'backbone'"):
        fit(Net, {"bakbone": 1.0})
    with pytest.raises(ValueError, match=r"a limit for 'back', but Net"):
        fit(Net, {"back": 1.0, "*": 1.0})
    with pytest.raises(ValueError, match=r"gradient_clip_val\['head'\]=-1 "):
        make_trainer(gradient_clip_val={"head": -1})
