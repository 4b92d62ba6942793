"""Lightning's summary of a model by layers."""

import pytest
import torch
from torch import nn
from treadle.compat.demos.boring_classes import BoringModel
from treadle.compat.utilities.model_summary.model_summary import UNKNOWN_SIZE, ModelSummary, summarize

import treadle
from treadle.utilities.model_summary import LayerSummary, get_human_readable_count
from treadle.utilities.model_summary import summarize as summarize_layers


def test_the_layers_of_a_summary_by_name() -> None:
    task = BoringModel()
    task.example_input_array = torch.ones(4, 32)
    ((name, row),) = summarize_layers(task)._layer_summary.items()
    assert (name, row.in_size, row.out_size, row.training) == ("layer", [4, 32], [4, 2], True)


def test_the_modules_of_a_summary() -> None:
    task = Own()
    found = [[name for name, _ in ModelSummary(task, depth).named_modules] for depth in (0, 1, -1)]
    assert found == [[], ["net"], ["net", "net.0", "net.1"]]


def test_numbers_of_a_summary() -> None:
    layer = nn.Conv2d(3, 8, 3)
    summary = LayerSummary(layer)
    layer(torch.ones(1, 3, 5, 5))
    assert (summary.layer_type, summary.num_parameters) == ("Conv2d", 224)
    assert (summary.in_size, summary.out_size) == ([1, 3, 5, 5], [1, 8, 3, 3])
    assert not layer._forward_hooks
    counts = [get_human_readable_count(n) for n in (0, 123, 1234, 999999, 2e6, 99950000, 3e9, 4e14, 5e15)]
    assert counts == ["0  ", "123  ", "1.2 K", "999 K", "2.0 M", "99.9 M", "3.0 B", "400 T", "5,000 T"]


class Own(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        self.scale = nn.Parameter(torch.ones(5))
        self.net[0].bias.requires_grad = False


def test_the_table_of_layers() -> None:
    for summary in (ModelSummary(Own(), max_depth=-1), summarize(Own(), max_depth=-1)):
        assert summary.layer_names == ["net", "net.0", "net.1"]
        assert summary.layer_types == ["Sequential", "Linear", "ReLU"]
        assert summary.param_nums == [9, 9, 0]
        assert (summary.total_parameters, summary.trainable_parameters, summary.total_layer_params) == (14, 11, 18)
        assert summary.model_size == pytest.approx(14 * 4e-6)
        assert summary.total_training_modes == {"train": 3, "eval": 0}
        assert "(own)" in str(summary)
        assert repr(summary) == str(summary)
    assert ModelSummary(Own(), 0).layer_names == []
    assert ModelSummary(Own()).layer_names == ["net"]
    with pytest.raises(ValueError, match="max_depth"):
        ModelSummary(Own(), -2)


def test_the_table_of_layers_has_the_modes_of_now_and_unknown_sizes() -> None:
    task = Own()
    summary = ModelSummary(task, max_depth=-1)
    task.net[0].eval()
    assert summary.total_training_modes == {"train": 2, "eval": 1}
    summary.layers[1].in_size = []  # a call without inputs
    assert summary.in_sizes == [UNKNOWN_SIZE] * 3
