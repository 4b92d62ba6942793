"""Steps that a task lacks, or has by another name."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import treadle

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


def loader():
    return DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=2)


class Misnamed(treadle.TaskModule):
    def train_step(self, batch, batch_idx): ...


class Unlike(treadle.TaskModule):
    def compute_loss(self, batch): ...


@pytest.mark.parametrize(
    ("task", "advice"),
    [(Misnamed, "Rename train_step to training_step."), (Unlike, "Define it to return the loss.")],
)
def test_a_step_of_another_name(task, advice):
    with pytest.raises(ValueError, match=f"{task.__name__} has no training_step. {advice}"):
        treadle.Trainer(**QUIET, logger=False).fit(task(), loader())
