"""An Accelerator that is configured differently on two ranks."""

import pytest
import torch
from support.processes import run
from torch import nn
from torch.utils.data import DataLoader
from treadle.engine.rank_consistency import check_values_match

import treadle
from treadle.utils import DataLoaderConfiguration


def refused(function):
    with pytest.raises(ValueError, match="configured differently") as caught:
        function()
    return str(caught.value)


def prepared():
    rank = treadle.Accelerator(cpu=True).process_index
    model, loader = nn.Linear(1, 1), DataLoader(range(8))
    found = []
    for first in (model, loader):
        accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=1 + rank)
        found.append(refused(lambda accelerator=accelerator, first=first: accelerator.prepare(first)))
        accelerator.gradient_accumulation_steps = 2
        accelerator.prepare(first)  # compared again, as the error changed nothing
    split = treadle.Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=bool(rank)))
    found.append(refused(lambda: split.prepare(model, loader)))
    if rank == 0:  # nothing that needs the others
        accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=7)
        accelerator.prepare_model(model, evaluation_mode=True)
        accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.prepare(nn.Linear(1, 1).requires_grad_(False))
    return found


def test_what_is_prepared_first_compares():
    first, second = run(prepared, 2, timeout=60)
    assert first == second
    for text in first[:2]:
        assert "gradient_accumulation_steps: 1 on rank 0, 2 on rank 1\n" in text
        assert "Pass the same values on every rank." in text
    assert "split_batches: False on rank 0, True on rank 1" in first[2]


class Ranks:
    """A world whose settings are known."""

    def __init__(self, *settings):
        self.settings, self.size = settings, len(settings)

    def gather_objects(self, value):
        return [repr(each) for each in self.settings] if isinstance(value, str) else list(self.settings)


def test_ranks_with_the_same_value_are_named_together():
    ranks = ({"steps": 1, "clip": 0.5}, {"steps": 1, "clip": 0.5}, {"steps": 2}, {}, {"steps": 1, "clip": 0.5})
    with pytest.raises(ValueError, match="they differ, so the ranks would take different steps") as caught:
        check_values_match("they differ", {}, Ranks(*ranks))
    assert str(caught.value).splitlines()[1:3] == [
        "  steps: 1 on ranks 0-1, 4; 2 on rank 2; missing on rank 3",
        "  clip: 0.5 on ranks 0-1, 4; missing on ranks 2-3",
    ]
    check_values_match("they differ", {}, Ranks({"steps": float("nan")}, {"steps": float("nan")}))
