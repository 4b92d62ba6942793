"""What a resume reads of a checkpoint: each file once for its digest, its manifest once, on one process or several."""

import shutil
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.checkpoint_reads import Reads, once
from support.models import Scored, loader
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from treadle.callbacks import LambdaCallback, ModelCheckpoint, WeightAveraging, averaged_weights
from treadle.engine.checkpoint.parts import read_manifest

import treadle


class Task(Scored):
    def __init__(self, width=2):
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Data(treadle.DataModule):
    def __init__(self):
        super().__init__()
        self.loaded = []

    def train_dataloader(self):
        return loader(8)

    val_dataloader = test_dataloader = train_dataloader

    def state_dict(self):
        return {"seen": 3}

    def load_state_dict(self, state):
        self.loaded.append(state)


def made(root, steps, *callbacks, form="file"):
    saver = ModelCheckpoint(root, "{step}", monitor="loss", every_n_train_steps=2, save_top_k=-1, format=form)
    callbacks = [saver, treadle.callbacks.GradientAccumulationScheduler({0: 1}), WeightAveraging(), *callbacks]
    return make_trainer(max_epochs=None, max_steps=steps, enable_checkpointing=True, callbacks=callbacks)


FORMS = ["file", "directory"]


@pytest.fixture(scope="module", params=FORMS)
def saved(tmp_path_factory, request):
    root = tmp_path_factory.mktemp("run")
    made(root, 2, form=request.param).fit(Task(), datamodule=Data())
    return root


def resume(root, stage, ckpt_path):
    run_again, data = made(root, 2), Data()
    with Reads() as reads, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fit: nothing is left to train
        getattr(run_again, stage)(Task(), datamodule=data, ckpt_path=ckpt_path)
    assert data.loaded == [{"seen": 3}]
    return reads.hashed, reads.parsed


def kinds(root):
    path = str(root / "step=2.ckpt")
    return [("fit", path), ("fit", "last"), ("fit", "auto"), ("fit", "best"), ("validate", path), ("test", "last")]


def resume_all(root):
    return [resume(root, stage, ckpt_path) for stage, ckpt_path in kinds(root)]


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_a_resume_reads_each_byte_once(saved, world):
    ranks = run(resume_all, world, saved)
    for (stage, ckpt_path), *reads in zip(kinds(saved), *ranks, strict=True):
        hashed = sum((files for files, _ in reads), start=Counter())
        assert hashed == once(saved / "step=2.ckpt"), (stage, ckpt_path)
        assert [parsed for _, parsed in reads] == [1, 0][:world], (stage, ckpt_path)
        assert all(files for files, _ in reads), "the processes share the work"


@pytest.mark.long
def test_loading_a_task_and_its_data_reads_each_byte_once(saved):
    path = saved / "step=2.ckpt"
    works = (Task.load_from_checkpoint, Data.load_from_checkpoint, averaged_weights)
    for work in works:
        with Reads() as reads:
            work(path)
        assert (reads.hashed, reads.parsed) == (once(path), 1), work


@pytest.mark.parametrize(("cls", "part"), [(Task, "hparams"), (Data, "datamodule_hparams")])
def test_hyperparameters_that_are_no_dict_are_refused(tmp_path, cls, part):
    accelerator = treadle.Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 1))
    path = accelerator.save_state(tmp_path / "saved", parts={part: []}, weights_only=True)
    with pytest.raises(ValueError, match=f"part '{part}' is damaged: it is a list, but must be a dict"):
        cls.load_from_checkpoint(path)


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_nothing_of_a_damaged_checkpoint_reaches_anyone(saved, tmp_path, stage):
    """What was damaged is still JSON, so that the digest alone tells it."""
    path = Path(shutil.copytree(saved, tmp_path / "run")) / "step=2.ckpt"
    file = path / "state.json" if path.is_dir() else path
    content = file.read_bytes()
    assert content.count(b'"seen":3') == 1
    file.write_bytes(content.replace(b'"seen":3', b'"seen":4'))
    run_again, data = made(tmp_path, 4), Data()
    with pytest.raises(ValueError, match=r"state.json is not (the file that|what) was written"):
        getattr(run_again, stage)(Task(), datamodule=data, ckpt_path=path)
    assert data.loaded == []


def newest_is_damaged(root):
    with warnings.catch_warnings(record=True, action="always") as caught:
        with Reads() as reads:
            resumed = made(root, 4)
            resumed.fit(Task(), datamodule=Data(), ckpt_path="last")
    skipped = [str(one.message) for one in caught if "skips a checkpoint" in str(one.message)]
    return str(resumed.ckpt_path), skipped, reads.hashed


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_all_processes_fall_back_together_and_no_file_is_read_twice(tmp_path, form):
    made(tmp_path, 4, form=form).fit(Task(), datamodule=Data())
    path = tmp_path / "step=4.ckpt"
    if form == "directory":
        model = path / "model.safetensors"
        model.write_bytes(model.read_bytes()[:-1] + b"\x01")
        name, reason = "model.safetensors", "is not the file that was written"
    else:
        with path.open("r+b") as file:
            file.seek(read_manifest(path).records.entries["data/0"]["at"])
            file.write(b"\x01")
        name, reason = "data/0", "is not what was written"
    ranks = run(newest_is_damaged, 2, tmp_path)
    assert {path for path, _, _ in ranks} == {str(tmp_path / "step=2.ckpt")}
    (said,) = ranks[0][1]  # on rank zero alone
    assert f"step=4.ckpt: {name} {reason}" in said
    hashed = sum((files for _, _, files in ranks), start=Counter())
    assert max(hashed.values()) == 1
    assert once(tmp_path / "step=2.ckpt") <= hashed


def test_a_checkpoint_is_let_go_once_all_is_restored(saved):
    held = []

    def watch(trainer, _):
        held.append(trainer.opened_checkpoint is not None)

    watching = LambdaCallback(on_fit_start=watch, on_train_start=watch)
    resumed = made(saved.parent / "more", 4, watching)
    resumed.fit(Task(), datamodule=Data(), ckpt_path=saved / "step=2.ckpt")
    assert held == [True, False]
    assert resumed.ckpt_path == str(saved / "step=2.ckpt")
