"""The keys of the training state: what is written has them all and no others."""

import contextlib
from typing import get_type_hints

import pytest
import torch
from support.failing_runs import Fails
from support.models import Line, loader
from support.stored import read_part
from support.trainers import make_trainer
from treadle.callbacks import ModelCheckpoint
from treadle.engine.checkpoint import content, train_state

import treadle


class Task(Line):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Data(treadle.DataModule):
    def train_dataloader(self):
        return loader()

    def state_dict(self):
        return {"seen": 3}


@pytest.mark.parametrize("fails", [False, True], ids=["between steps", "on the way out of an error"])
def test_a_saved_run_has_these_keys_and_one_that_is_added_in_one_place(tmp_path, monkeypatch, fails):
    """Of a save between two steps, and of that which rank zero makes alone on the way out of an error."""
    collect = content.collect_train_state
    monkeypatch.setattr(content, "collect_train_state", lambda *args, **options: collect(*args, **options) | {"new": 3})
    callbacks = [ModelCheckpoint(tmp_path, save_on_exception=fails), *([Fails("forward", 1)] if fails else [])]
    trainer = make_trainer(max_steps=2, enable_checkpointing=True, callbacks=callbacks)
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        trainer.fit(Task(), datamodule=Data())
    (saved,) = tmp_path.glob("*.ckpt")
    state, own = read_part(saved, "state"), read_part(saved, "rank-00000")
    assert state.pop("new") == 3
    written = {
        train_state.TrainState: state,
        train_state.TrainerStates: state["registered"],
        train_state.CallbackStates: state["registered"]["callbacks"],
        train_state.RankState: own,
        train_state.RandomState: {"cuda": [], "cuda_device": 0, "mps": None, **own["random"]},
        train_state.OptimizerState: read_part(saved, "optimizer"),
    }
    for form, values in written.items():
        assert set(values) == set(get_type_hints(form)), form
