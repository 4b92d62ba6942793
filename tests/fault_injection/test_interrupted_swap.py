"""A save killed between its two renames leaves no checkpoint under its name: whatever reads it there finds it again."""

import contextlib
import itertools
import json
import os
import shutil

import pytest
import torch
from support.models import SGDTask, loader
from support.processes import run
from support.stored import DEAD
from support.trainers import make_trainer
from treadle.callbacks import EMAWeightAveraging, ModelCheckpoint, averaged_weights
from treadle.cli.commands.command_line import read_earlier_config
from treadle.cli.commands.export import export
from treadle.engine.checkpoint import store

import treadle


class Task(SGDTask):
    def __init__(self, width=2):
        super().__init__()
        self.save_hyperparameters()
        self.weight = torch.nn.Parameter(torch.ones(2, width))

    def training_step(self, batch, batch_idx):
        self.log("loss", loss := (batch[0] @ self.weight).square().mean())
        return loss

    validation_step = test_step = training_step

    def predict_step(self, batch, batch_idx):
        return batch[0] @ self.weight


class Data(treadle.DataModule):
    def train_dataloader(self):
        return loader()

    def state_dict(self):
        return {"state": 3}

    def load_state_dict(self, state_dict):
        self.loaded = state_dict


def form_of(folder):
    """The form of the checkpoints in a folder, also while they have other names."""
    return "directory" if any(path.is_dir() for path in folder.iterdir() if ".ckpt" in path.name) else "file"


def trainer(folder, steps=2, form=None):
    saving = ModelCheckpoint(folder, "best", monitor="loss", save_last=True, format=form or form_of(folder))
    callbacks = [saving, EMAWeightAveraging()]
    return make_trainer(max_epochs=None, max_steps=steps, devices=1, callbacks=callbacks, enable_checkpointing=True)


def resumed(name):
    def door(path):
        own, task = trainer(path.parent, 4), Task()
        own.fit(task, Data(), ckpt_path=path if name == "path" else name)
        return task.weight.tolist()

    return door


def looked_at(stage, ckpt_path=None):
    def door(path):
        own, task = trainer(path.parent), Task()
        method = getattr(own, stage)
        return method(task, loader(), ckpt_path=ckpt_path or path), task.weight.tolist()

    return door


def after_the_fit(path):
    """The best one, which the callback of this process has saved."""
    folder = path.parent / "own"
    own = trainer(folder, form=form_of(path.parent))
    own.fit(Task(), Data())
    interrupt(folder / "best.ckpt", finished=False)
    return own.validate(dataloaders=loader(), ckpt_path="best")


def exported(path):
    export(path, path.parent / "exported.safetensors")
    return sorted(path.parent.glob("exported*"))[0].name


def started_from(path):
    with contextlib.suppress(ValueError):  # this run had no configuration, which is said of a checkpoint that is there
        read_earlier_config(path)


DOORS = {
    "fit": resumed("path"),
    "last": resumed("last"),
    "auto": resumed("auto"),
    "best": resumed("best"),
    **{stage: looked_at(stage) for stage in ("validate", "test", "predict")},
    "validate last": looked_at("validate", "last"),
    "after the fit": after_the_fit,
    "load_weights": lambda path: treadle.load_weights(Task(), path),
    "load_checkpoint": lambda path: treadle.load_checkpoint(path)["global_step"],
    "load_checkpoint_in_model": lambda path: treadle.load_checkpoint_in_model(Task(), path),
    "task": lambda path: Task.load_from_checkpoint(path).weight.tolist(),
    "data": lambda path: Data.load_from_checkpoint(path).loaded,
    "averaged_weights": lambda path: sorted(averaged_weights(path)),
    "export": exported,
    "--from-run": started_from,
}
FORMS = ("file", "directory")
ALIKE = ("test", "predict", "validate last", "data", "load_checkpoint", "load_checkpoint_in_model", "averaged_weights")


def interrupt(target, finished):
    """Leave what a kill between the renames leaves; with ``finished``, the next checkpoint is whole.

    A directory is renamed before any replacement, and a file before that by a directory.
    """
    assert store.is_checkpoint(target)
    if finished:
        copy = shutil.copytree if target.is_dir() else shutil.copy
        copy(target, target.with_name(f".{target.name}.{DEAD}.part"))
    target.rename(target.with_name(f".{target.name}.{DEAD}.old"))


def make_run(folder, form):
    trainer(folder, form=form).fit(Task(), Data())
    assert sorted(os.listdir(folder)) == ["best.ckpt", "last.ckpt"]
    return folder


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("door", "finished", "form"),
    [
        # Each door with one of both, and with one form, by default, and of doors that find it alike one.
        pytest.param(door, finished, form, marks=() if usual else pytest.mark.exhaustive)
        for n, door in enumerate(DOORS)
        for finished, form in itertools.product((False, True), FORMS)
        for usual in [(n + finished) % 2 and door not in ALIKE and form == FORMS[n // 2 % 2]]
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_every_door_finds_a_checkpoint_whose_replacement_was_killed(tmp_path, door, finished, form):
    whole, killed = make_run(tmp_path / "whole", form), make_run(tmp_path / "killed", form)
    name = "best.ckpt" if door == "best" else "last.ckpt"
    expected = DOORS[door](whole / name)
    interrupt(killed / name, finished)
    found = DOORS[door](killed / name)
    assert json.dumps(found, default=str) == json.dumps(expected, default=str)
    if door not in ("after the fit", "validate last"):  # which reads it where it is
        assert (killed / name).is_dir() == (form == "directory")
        store.verify(killed / name)
        assert not any(entry.startswith((".last", ".best")) for entry in os.listdir(killed))


def read_at_once(path):
    treadle.Accelerator(cpu=True).wait_for_everyone()
    return Task.load_from_checkpoint(path).weight.tolist()


@pytest.mark.parametrize("form", ["file", pytest.param("directory", marks=pytest.mark.exhaustive)])
def test_several_processes_find_it_again_at_once(tmp_path, form):
    make_run(tmp_path / "ckpt", form)
    interrupt(tmp_path / "ckpt" / "last.ckpt", finished=True)
    first, second = run(read_at_once, 2, tmp_path / "ckpt" / "last.ckpt")
    assert first == second
    assert sorted(os.listdir(tmp_path / "ckpt")) == ["best.ckpt", "last.ckpt"]
