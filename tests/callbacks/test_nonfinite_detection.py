"""`NonFiniteWatch` names the first part of a model that breaks, and changes nothing."""

import pytest
import torch
from support.callback_runs import Tiny, fit, loader, trainer
from support.models import SGDTask
from torch import nn
from treadle.callbacks import (
    NonFiniteWatch,
)


class Breaks(SGDTask):
    def __init__(self, where):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)
        self.where = where

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.where == "forward":
            with torch.no_grad():
                self.second.weight.fill_(float("inf"))
        hidden = self.first(batch[0])
        if batch_idx == 2 and self.where == "backward":
            hidden = (hidden * 0).sqrt()
        return self.second(hidden).mean()


@pytest.mark.parametrize(
    ("where", "found"),
    [("forward", r"output of second \(Linear\)"), ("backward", r"gradient of the output of first \(Linear\)")],
)
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_the_first_part_that_breaks_is_named(tmp_path, where, found, strategy):
    task = Breaks(where)
    with pytest.raises(ValueError, match=f"{found} is the first .* step 3 "):
        trainer(tmp_path, NonFiniteWatch(), strategy=strategy).fit(task, loader())
    assert not any(part._forward_hooks for part in (task.first, task.second) if strategy == "single")


def test_looking_changes_nothing(tmp_path):
    tasks = Tiny(), Tiny()
    fit(tmp_path, NonFiniteWatch(), task=tasks[0])
    fit(tmp_path, task=tasks[1])
    assert torch.equal(tasks[0].net.weight, tasks[1].net.weight)
