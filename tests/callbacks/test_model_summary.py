"""`ModelSummary` and `summarize`: what a table of the model's parts says, and that looking changes nothing."""

import pytest
import torch
from support.callback_runs import Example, fit, trainer
from support.processes import run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import ModelSummary, RichModelSummary


def test_lightnings_name_of_the_depth():
    assert ModelSummary(max_depth=3)._max_depth == ModelSummary(max_depth=3).max_depth == 3


def test_the_table_is_printed_when_fit_begins(tmp_path, capsys):
    fit(tmp_path, ModelSummary(max_depth=-1), max_steps=1)
    assert "3 trainable, 0 frozen" in capsys.readouterr().err
    fit(tmp_path, ModelSummary(max_depth=0), max_steps=1)
    assert "in train mode" not in capsys.readouterr().err
    fit(tmp_path, ModelSummary(), task=Example(), max_steps=1, precision="bf16-true")
    assert "12  [3, 2]  [3, 1]" in capsys.readouterr().err


def test_lightnings_method_of_a_subclass_prints(tmp_path, capsys):
    class Own(RichModelSummary):
        @staticmethod
        def summarize(columns, total_parameters, trainable_parameters, model_size, total_training_modes, **options):
            totals = [total_parameters, trainable_parameters, model_size, total_training_modes]
            found.extend((columns, totals, options))

    found = []
    fit(tmp_path, Own(2, "bold"), task=Example(), max_steps=1)
    assert "trainable" not in capsys.readouterr().err
    columns, totals, options = found
    assert [head for head, _ in columns] == [" ", "Name", "Type", "Params", "Mode", "FLOPs", "In sizes", "Out sizes"]
    assert {len(cells) for _, cells in columns} == {1}
    assert (dict(columns)["Type"], dict(columns)["Out sizes"]) == (["Linear"], ["[3, 1]"])
    assert totals == [3, 3, 1.2e-05, {"train": 1, "eval": 0}]
    assert options == {"total_flops": 12, "header_style": "bold"}


def test_whatever_fails_in_it_does_not_end_the_run(tmp_path):
    class Bad(ModelSummary):
        def show(self, summary):
            raise KeyError("mistake")

    with pytest.warns(UserWarning, match="Bad failed and is disabled: KeyError: 'mistake'"):
        assert fit(tmp_path, Bad()).global_step == 10


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


def test_a_sharded_model(tmp_path):
    first, second = run(sharded, 2, str(tmp_path))
    assert second == []
    columns, total = first[0]
    table = dict(columns)
    assert total == 33
    assert (table["name"], table["type"], table["parameters"]) == (["net"], ["Sequential"], ["33"])
    assert table["per device"] == [str(8 + 4 + 8 + 1)]  # rows are dealt, and the last layer has one
    assert (table["in"], table["out"], table["FLOPs"]) == (["[3, 2]"], ["[3, 1]"], [str(2 * 3 * (2 * 8 + 8))])
