"""The keys of the training state: what is written has them all and no others, and what lacks one is refused."""

import contextlib
from typing import get_type_hints

import pytest
import torch
from support.stored import read_part
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import ModelCheckpoint
from treadle.engine.checkpoint import content
from treadle.engine.checkpoint.train_state import (
    CallbackStates,
    OptimizerState,
    RandomState,
    RankState,
    TrainerStates,
    TrainState,
    check_form,
)

import treadle


class Task(treadle.TaskModule):
    def __init__(self, fails=False):
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.fails = fails

    def training_step(self, batch, batch_idx):
        if self.fails and self.trainer.global_step:
            raise ArithmeticError
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Data(treadle.DataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)

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


@pytest.mark.parametrize(
    ("form", "value", "said"),
    [
        (RankState, {"random": {}}, r"entries are missing or have a wrong type: buffers \(list\)"),
        (RankState, {"random": [], "buffers": []}, r"entries are missing or have a wrong type: random \(dict\)"),
        (RankState, [], r"entries are missing or have a wrong type: random \(dict\), buffers \(list\)"),
        (OptimizerState, {}, r"entries are missing or have a wrong type: class \(str\), shapes \(dict\), .*, others"),
    ],
)
def test_another_form_is_refused_by_name(tmp_path, form, value, said):
    with pytest.raises(ValueError, match=said):
        check_form(form, value, tmp_path, "part")
