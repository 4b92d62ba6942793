"""`ModelSummary` and `summarize`: what a table of the model's parts says, and that looking changes nothing."""

import re

import pytest
import torch
from support.callback_runs import Tiny, fit, trainer
from support.processes import run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import ModelSummary, summarize


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


def test_lightnings_name_of_the_depth():
    assert ModelSummary(max_depth=3)._max_depth == ModelSummary(max_depth=3).max_depth == 3


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
    assert found.flop_counts == {"norm": 0, "twice": 2 * (2 * 5 * 4 * 4), "pair": 0}
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


class Example(Tiny):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.example_input_array = torch.ones(3, 2)

    def forward(self, x):
        torch.rand(2)
        return self.net(x)


def test_the_table_is_printed_when_fit_begins(tmp_path, capsys):
    fit(tmp_path, ModelSummary(max_depth=-1), max_steps=1)
    assert "3 trainable, 0 frozen" in capsys.readouterr().err
    fit(tmp_path, ModelSummary(max_depth=0), max_steps=1)
    assert "in train mode" not in capsys.readouterr().err
    for depth in (-2, "all"):
        with pytest.raises(ValueError, match="max_depth"):
            ModelSummary(depth)
    fit(tmp_path, ModelSummary(), task=Example(), max_steps=1, precision="bf16-true")
    assert "12  [3, 2]  [3, 1]" in capsys.readouterr().err


def test_whatever_fails_in_it_does_not_end_the_run(tmp_path):
    class Bad(ModelSummary):
        def show(self, summary):
            raise KeyError("mistake")

    with pytest.warns(UserWarning, match="Bad failed and is disabled: KeyError: 'mistake'"):
        assert fit(tmp_path, Bad()).global_step == 10


def test_with_and_without_a_summary_the_run_is_the_same(tmp_path):
    class Draws(Example):
        def training_step(self, batch, batch_idx):
            return (self(batch[0]) + torch.rand(1)).pow(2).mean()

    ends = []
    for callbacks in ([], [ModelSummary()]):
        torch.manual_seed(1)
        ends.append(fit(tmp_path, *callbacks, task=Draws()).task.net.weight)
    assert torch.equal(*ends)


class Whole(Example):
    def configure_model(self):
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 1))


def sharded(root):
    found = []

    class Keeps(ModelSummary):
        def show(self, summary):
            found.append((summary.columns(), summary.total_parameters))

    made = trainer(root, Keeps(), strategy="fsdp", devices=2, max_steps=1)
    made.fit(Whole(), DataLoader(TensorDataset(torch.randn(8, 2)), 2))
    return found


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch can not shard on CPU (2.6)")
def test_a_sharded_model(tmp_path):
    first, second = run(sharded, 2, str(tmp_path))
    assert second == []
    columns, total = first[0]
    table = dict(columns)
    assert total == 33
    assert (table["name"], table["type"], table["parameters"]) == (["net"], ["Sequential"], ["33"])
    assert table["per device"] == [str(8 + 4 + 8 + 1)]  # rows are dealt, and the last layer has one
    assert (table["in"], table["out"], table["FLOPs"]) == (["[3, 2]"], ["[3, 1]"], [str(2 * 3 * (2 * 8 + 8))])
