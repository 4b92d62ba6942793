"""The keys of the training state: what is written has them all and no others."""

import contextlib
from typing import get_type_hints

import pytest
import torch
from support.models import Line, loader
from support.stored import read_part
from support.trainers import make_trainer
from treadle.callbacks import ModelCheckpoint
from treadle.engine.checkpoint import content
from treadle.engine.checkpoint.train_state import (
    CallbackStates,
    OptimizerState,
    RandomState,
    RankState,
    TrainerStates,
    TrainState,
)

import treadle


class Task(Line):
    def __init__(self, fails):
        super().__init__()
        self.fails = fails

    def training_step(self, batch, batch_idx):
        if self.fails and self.trainer.global_step:
            raise ArithmeticError
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Data(treadle.DataModule):
    def train_dataloader(self):
        return loader()

    def state_dict(self):
        return {"seen": 3}


@pytest.fixture(params=[False, True], ids=["between steps", "on the way out of an error"])
def saved(request, tmp_path):
    saver = ModelCheckpoint(tmp_path, "{step}", save_on_exception=request.param)
    trainer = make_trainer(max_steps=2, enable_checkpointing=True, callbacks=[saver])
    with pytest.raises(ArithmeticError) if request.param else contextlib.nullcontext():
        trainer.fit(Task(request.param), datamodule=Data())
    (path,) = tmp_path.glob("*.ckpt")
    return path


@pytest.fixture
def a_new_entry(monkeypatch):
    collect = content.collect_train_state
    monkeypatch.setattr(content, "collect_train_state", lambda *args, **options: collect(*args, **options) | {"new": 3})


def test_a_saved_run_has_these_keys_and_one_that_is_added_in_one_place(a_new_entry, saved):
    """Of a save between two steps, and of that which rank zero makes alone on the way out of an error."""
    state, own = read_part(saved, "state"), read_part(saved, "rank-00000")
    assert state.pop("new") == 3
    written = {
        TrainState: state,
        TrainerStates: state["registered"],
        CallbackStates: state["registered"]["callbacks"],
        RankState: own,
        RandomState: {"cuda": [], "cuda_device": 0, "mps": None, **own["random"]},
        OptimizerState: read_part(saved, "optimizer"),
    }
    for form, values in written.items():
        assert set(values) == set(get_type_hints(form)), form
