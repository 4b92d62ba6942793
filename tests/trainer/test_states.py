"""The state of a Trainer in each stage, as in Lightning."""

from __future__ import annotations

import pytest
from support.models import Scored, loader
from support.trainers import make_trainer
from treadle.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus


class Watching(Scored):
    def loss(self, batch):
        self.seen = [*getattr(self, "seen", []), self.trainer.state]
        return super().loss(batch)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def test_step(self, batch, batch_idx):
        self.loss(batch)
        raise RuntimeError("no")


def test_states() -> None:
    task, trainer = Watching(), make_trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=1)
    assert trainer.state == TrainerState(TrainerStatus.INITIALIZING, None, None)
    trainer.fit(task, loader(), loader())
    stages = [RunningStage.SANITY_CHECKING, RunningStage.TRAINING, RunningStage.VALIDATING]
    assert task.seen == [TrainerState(TrainerStatus.RUNNING, TrainerFn.FITTING, stage) for stage in stages]
    assert [state.stage.evaluating for state in task.seen] == [True, False, True]
    assert (trainer.state.fn, trainer.state.stage, trainer.state.finished) == ("fit", None, True)
    with pytest.raises(RuntimeError):
        trainer.test(task, loader())
    assert task.seen[-1] == TrainerState(TrainerStatus.RUNNING, TrainerFn.TESTING, RunningStage.TESTING)
    assert trainer.state == TrainerState(TrainerStatus.INTERRUPTED, TrainerFn.TESTING, None)
    assert (trainer.state.stopped, trainer.state.finished) == (True, False)
    assert RunningStage.SANITY_CHECKING.dataloader_prefix == "val"
    assert {TrainerFn.FITTING: 1}["fit"] == 1
