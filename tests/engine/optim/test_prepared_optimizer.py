"""Gradients dropped by a prepared optimizer's ``zero_grad``, and copies of a prepared optimizer."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from treadle import Accelerator


class CountingSGD(torch.optim.SGD):
    zeroed = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeroed += 1
        super().zero_grad(set_to_none)


def prepare(kind: type[torch.optim.Optimizer]) -> tuple[nn.Linear, Any]:
    model = nn.Linear(2, 2)
    model, optimizer = Accelerator(cpu=True).prepare(model, kind(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    return model, optimizer


@pytest.mark.parametrize("kind", [torch.optim.SGD, CountingSGD])
def test_zero_grad_drops_the_gradients(kind: type[torch.optim.Optimizer]) -> None:
    model, optimizer = prepare(kind)
    optimizer.zero_grad()
    assert [parameter.grad for parameter in model.parameters()] == [None, None]


def test_an_optimizers_own_zero_grad_is_called() -> None:
    _, optimizer = prepare(CountingSGD)
    optimizer.zero_grad()
    assert optimizer.optimizer.zeroed == 1


def test_a_patched_zero_grad_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = prepare(torch.optim.SGD)
    calls: list[bool] = []
    monkeypatch.setattr(optimizer.optimizer, "zero_grad", lambda set_to_none: calls.append(set_to_none))
    optimizer.zero_grad()
    assert calls == [True]


def test_gradients_can_be_kept_as_zeros() -> None:
    model, optimizer = prepare(torch.optim.SGD)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(model.weight.grad, torch.zeros(2, 2))


def test_a_profile_names_zero_grad() -> None:
    _, optimizer = prepare(torch.optim.SGD)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        optimizer.zero_grad()
    assert "Optimizer.zero_grad#SGD.zero_grad" in {row.key for row in recorded.key_averages()}


def copy_with_torch(optimizer: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("make_copy", [lambda o: pickle.loads(pickle.dumps(o)), copy.deepcopy, copy_with_torch])
def test_a_copy_is_the_wrapped_optimizer_with_its_state(make_copy: Any) -> None:
    model = nn.Linear(2, 2)
    prepared = Accelerator(cpu=True).prepare(torch.optim.Adam(model.parameters(), lr=0.1))
    x = torch.tensor([[1.0, -2.0]])
    model(x).square().sum().backward()
    prepared.step()
    copied = make_copy(prepared)
    assert type(copied) is torch.optim.Adam
    weight, bias = copied.param_groups[0]["params"]
    assert torch.equal(weight, model.weight)
    for optimizer in (prepared, copied):
        optimizer.zero_grad()
    nn.functional.linear(x, weight, bias).square().sum().backward()
    copied.step()
    assert not torch.equal(weight, model.weight)  # its parameters are its own
    model(x).square().sum().backward()
    prepared.step()
    assert torch.equal(weight, model.weight)  # the moments and the step count came along
