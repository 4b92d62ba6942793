"""The summary of a model: its table, sizes and operations."""

import re

import pytest
import torch
from torch import nn
from treadle.callbacks import summarize


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.body = nn.Sequential(nn.Linear(10, 100), nn.Dropout())
        self.head = nn.Linear(100, 1)
        self.head.requires_grad_(False).eval()
        self.lazy = nn.LazyLinear(2)


def rows_of(text):
    return [re.split(r"  +", line) for line in str(text).splitlines()]


def test_the_table():
    found = summarize(Parts())
    assert rows_of(found)[0] == ["name", "type", "parameters", "mode"]
    assert rows_of(found)[2:-3] == [
        ["body", "Sequential", "1,100", "train"],
        ["head", "Linear", "101", "eval, frozen"],
        ["lazy", "LazyLinear", "lazy", "train"],
        ["(own)", "Parts", "3", "train"],
    ]
    assert str(found).splitlines()[-2:] == [
        "1,204 + lazy parameters: 1,103 + lazy trainable, 101 frozen; 0.0 MiB",
        "4 modules in train mode, 1 in eval mode",
    ]
    assert found.layer_names == ["body", "head", "lazy", "(own)"]
    assert found.layer_types == ["Sequential", "Linear", "LazyLinear", "Parts"]
    assert (found.total_parameters, found.trainable_parameters, found.model_size) == (1204, 1103, 1204 * 4 / 1e6)
    assert found.total_training_modes == {"train": 4, "eval": 1}
    assert "body.0" in summarize(Parts(), 2).layer_names
    assert "body.0" in summarize(Parts(), -1).layer_names
    assert summarize(Parts(), 0).layer_names == ["(own)"]
    with pytest.raises(ValueError, match="max_depth=-2"):
        summarize(Parts(), -2)


class Seen(nn.Module):
    """A model that draws, counts what it saw and calls one part twice."""

    def __init__(self, example):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.twice = nn.Linear(4, 4, bias=False)
        self.pair = Pair()
        self.example_input_array = example
        self.norm.train(False)

    def forward(self, x, scale=1.0):
        torch.rand(3)
        x = self.twice(self.twice(self.norm(x))) * scale
        return self.pair(x, y={"z": x[:2]})


class Pair(nn.Module):
    def forward(self, x, y):
        return x, [y["z"]]


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_sizes_and_operations(form):
    x = torch.randn(5, 4)
    module = Seen({"tensor": x, "tuple": (x, 2.0), "dict": {"x": x, "scale": 2.0}}[form])
    before, random = {k: v.clone() for k, v in module.state_dict().items()}, torch.get_rng_state()
    modes = [part.training for part in module.modules()]
    found = summarize(module)
    assert found.in_sizes == [[5, 4], [5, 4], [[5, 4], {"z": [2, 4]}]]
    assert found.out_sizes == [[5, 4], [5, 4], [[5, 4], [[2, 4]]]]
    assert {row.name: row.flops for row in found.layers} == {"norm": 0, "twice": 2 * (2 * 5 * 4 * 4), "pair": 0}
    assert found.total_flops == 2 * (2 * 5 * 4 * 4)
    assert [part.training for part in module.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert rows_of(found)[0] == ["name", "type", "parameters", "mode", "FLOPs", "in", "out"]
    assert rows_of(found)[3] == ["twice", "Linear", "16", "train", "320", "[5, 4]", "[5, 4]"]


def test_on_the_meta_device_nothing_is_computed():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(1000, 2000), nn.Linear(2000, 10))
    module.example_input_array = torch.randn(3, 1000)
    found = summarize(module)
    assert found.out_sizes == [[3, 2000], [3, 10]]
    assert found.total_flops == 2 * 3 * (1000 * 2000 + 2000 * 10)


def test_an_example_that_does_not_fit_is_no_reason_to_stop():
    module = Seen(torch.randn(5, 3))
    with pytest.warns(UserWarning, match=r"on example_input_array \(.*\), so the summary shows neither FLOPs nor"):
        found = summarize(module)
    assert rows_of(found)[0] == ["name", "type", "parameters", "mode"]
    lazy = Parts()
    lazy.example_input_array = torch.randn(2, 10)  # to run it would draw the lazy weights now
    assert summarize(lazy).total_flops == 0
