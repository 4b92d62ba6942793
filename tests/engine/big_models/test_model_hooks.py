"""Hooks of a module's forward: what they are told and change, one after the other, and when they are removed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support.models import Normed
from torch import nn
from treadle.compat.hooks import ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module

INPUT = torch.arange(6.0).reshape(2, 3)


class AddBefore(ModelHook):
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] + 1, *args[1:]), kwargs


class AddAfter(ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output + 1


class Steps(ModelHook):
    def __init__(self) -> None:
        self.steps: list[str] = []

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.steps.append("init")
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.steps.append("detach")
        return module


@pytest.fixture
def model() -> Normed:
    return Normed().eval()


def test_hooks_replace_and_follow_each_other(model: Normed) -> None:
    plain, one_more, two_more = model(INPUT), model(INPUT + 1), model(INPUT + 2)
    assert add_hook_to_module(model, AddBefore()) is model
    assert model.forward.__name__ == "forward"
    assert torch.equal(model(INPUT), one_more)
    add_hook_to_module(model, AddBefore())
    assert torch.equal(model(INPUT), one_more)
    add_hook_to_module(model, AddBefore(), append=True)
    assert isinstance(model._hf_hook, SequentialHook)
    assert torch.equal(model(INPUT), two_more)
    add_hook_to_module(model, AddAfter())
    assert torch.equal(model.forward(INPUT), plain + 1)
    remove_hook_from_module(model)
    assert not {"_hf_hook", "_old_forward", "forward"} & vars(model).keys()
    assert torch.equal(model(INPUT), plain)


def test_a_hook_may_forbid_gradients(model: Normed) -> None:
    hook = AddAfter()
    hook.no_grad = True
    assert not add_hook_to_module(model, hook)(INPUT).requires_grad
    add_hook_to_module(model, AddAfter(), append=True)
    assert not model(INPUT).requires_grad


def test_when_a_hook_is_told(model: Normed) -> None:
    first, second, third = Steps(), Steps(), Steps()
    add_hook_to_module(model, first)
    add_hook_to_module(model, second)
    assert (first.steps, second.steps) == (["init"], ["init"])
    add_hook_to_module(model, third, append=True)
    assert second.steps == ["init", "detach", "init"]
    add_hook_to_module(model.linear1, first)
    remove_hook_from_module(model, recurse=True)
    assert (first.steps[-1], third.steps) == ("detach", ["init", "detach"])


def test_copies_have_hooks_of_their_own(model: Normed) -> None:
    plain = model(INPUT)
    add_hook_to_module(model, AddAfter())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            twin.linear2.bias += 1
        assert torch.allclose(twin(INPUT), plain + 2)
    assert torch.equal(model(INPUT), plain + 1)


def test_a_traced_module_can_be_traced_again() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))
    plain = traced(INPUT)
    add_hook_to_module(traced, AddAfter())
    assert torch.equal(traced(INPUT), plain + 1)
    remove_hook_from_module(traced)
    assert torch.equal(traced(INPUT), plain)


@pytest.mark.long
def test_a_hook_under_torch_compile(model: Normed) -> None:
    plain = model(INPUT)
    add_hook_to_module(model, AddAfter())
    assert torch.allclose(torch.compile(model, backend="eager")(INPUT), plain + 1)
