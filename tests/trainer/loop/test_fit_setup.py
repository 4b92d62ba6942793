"""Steps that a task lacks, or has by another name."""

import pytest
from support.models import loader
from support.trainers import make_trainer

import treadle


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
        make_trainer().fit(task(), loader())
