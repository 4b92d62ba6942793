"""Plugins that write and read the files of checkpoints, as in Lightning."""

from __future__ import annotations

import datetime
import os

import pytest
import torch
from support.checkpoint_dicts import Recording, Task, are_equal, fitted, loader
from support.trainers import NO_OUTPUT
from torch.utils.data import DataLoader
from treadle.compat.plugins import AsyncCheckpointIO, TorchCheckpointIO

import treadle


@pytest.mark.parametrize("io", [TorchCheckpointIO(), AsyncCheckpointIO()], ids=["torch", "async"])
def test_checkpoint_files(io, tmp_path) -> None:
    path, weight = tmp_path / "deep" / "x.ckpt", torch.ones(2)
    io.save_checkpoint({"weight": weight, "epoch": 3}, path)
    weight.zero_()
    io.teardown()
    loaded = io.load_checkpoint(path)
    assert loaded["epoch"] == 3
    if isinstance(io, AsyncCheckpointIO):
        assert loaded["weight"].tolist() == [1.0, 1.0]
    io.remove_checkpoint(path)
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(path)


def test_a_failed_write_beside_the_training_raises(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    io = AsyncCheckpointIO()
    io.save_checkpoint({}, tmp_path / "file" / "x.ckpt")
    with pytest.raises(OSError, match="file"):
        io.teardown()


@pytest.mark.long
@pytest.mark.parametrize("wrap", [lambda io: io, AsyncCheckpointIO], ids=["direct", "async"])
def test_a_plugin_writes_all_checkpoints_and_a_resume_is_exact(wrap, tmp_path):
    recording = Recording()
    plugin = wrap(recording)
    _, trainer = fitted(tmp_path / "cut", 2, plugin)
    last = trainer.checkpoint_callback.last_model_path
    assert sorted(os.listdir(tmp_path / "cut")) == ["epoch=1-step=16.ckpt", "last.ckpt"]
    saves = [name for call, name in recording.calls if call == "save"]
    assert saves == ["epoch=0-step=8.ckpt", "last.ckpt", "epoch=1-step=16.ckpt", "last.ckpt"]
    assert ("remove", "epoch=0-step=8.ckpt") in recording.calls
    for word in ("last", "auto"):
        with pytest.raises(ValueError, match=f"ckpt_path='{word}' cannot select among the checkpoints of"):
            fitted(tmp_path / "cut", 4, plugin, word)
    resumed, _ = fitted(tmp_path / "cut", 4, plugin, last)
    assert ("load", "last.ckpt") in recording.calls
    assert are_equal(resumed, fitted(tmp_path / "whole", 4)[0])
    assert Task.load_from_checkpoint(last).hparams == {"lr": 0.1}
    # The dict's two sides share their tensors in the file.
    assert os.path.getsize(last) < 1.5 * os.path.getsize(next((tmp_path / "whole").glob("last.ckpt")))


class Chosen(Task):
    def __init__(self, kind=torch.optim.Adam, day=None, shift=None, changed=1):
        super().__init__()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["hyper_parameters"]["changed"] = 2


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_plugins_file_holds_classes_dates_and_tensors_of_hyperparameters(weights_only, tmp_path):
    trainer = treadle.Trainer(max_steps=1, plugins=Recording(), **NO_OUTPUT)
    day, shift = datetime.date(2021, 2, 3), torch.arange(2.0)
    trainer.fit(Chosen(torch.optim.SGD, day, shift), loader())
    trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only)
    del trainer
    loaded = Chosen.load_from_checkpoint(tmp_path / "x.ckpt").hparams
    assert (loaded["kind"], loaded["day"], loaded["changed"]) == (torch.optim.SGD, day, 2)
    assert loaded["shift"].equal(shift)


@pytest.mark.parametrize("files", [{"hparams.json": b"[["}, {"state.json": b'{"registered": 1}'}])
def test_a_plugins_damaged_file_is_an_ordinary_error(files, tmp_path):
    torch.save({"state_dict": {}, "treadle": {"files": files}}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"x\.ckpt cannot be read"):
        Chosen.load_from_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.parametrize("plugin", [None, Recording()], ids=["default", "plugin"])
def test_a_strategy_writes_reads_and_removes_files(plugin, tmp_path):
    path = str(tmp_path / "copy.ckpt")

    class Copies(treadle.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.strategy.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(), path)

    trainer = treadle.Trainer(max_epochs=1, callbacks=Copies(), plugins=plugin, **NO_OUTPUT)
    trainer.fit(task := Task(), loader())
    content = trainer.strategy.load_checkpoint(path)
    assert (content["global_step"], content["hyper_parameters"]) == (trainer.global_step, task.hparams)
    assert are_equal(Task.load_from_checkpoint(path), task)
    trainer.strategy.remove_checkpoint(path)
    assert os.listdir(tmp_path) == []
    assert plugin is None or plugin.calls == [(call, "copy.ckpt") for call in ("save", "load", "remove")]


def test_a_plugin_of_its_own_format(tmp_path):
    class InMemory(treadle.plugins.CheckpointIO):
        kept = {}

        def save_checkpoint(self, checkpoint, path, storage_options=None):
            self.kept[str(path)] = {**checkpoint, "mine": 1}
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write("in memory")

        def load_checkpoint(self, path, map_location=None, weights_only=None):
            return self.kept[str(path)]

        def remove_checkpoint(self, path):
            del self.kept[str(path)]
            os.remove(path)

    _, trainer = fitted(tmp_path / "cut", 2, InMemory())
    assert {os.path.basename(path) for path in InMemory.kept} == set(os.listdir(tmp_path / "cut"))
    assert len(InMemory.kept) == 2
    last = trainer.checkpoint_callback.last_model_path
    assert are_equal(fitted(tmp_path / "cut", 4, InMemory(), last)[0], fitted(tmp_path / "whole", 4)[0])


def test_a_file_of_another_library_is_evaluated_but_not_resumed(tmp_path):
    task = Task()
    torch.save({"state_dict": task.state_dict(), "epoch": 3, "global_step": 7}, tmp_path / "theirs.ckpt")
    torch.save({"weights": 1}, tmp_path / "other.ckpt")
    torch.save({"state_dict": task.state_dict(), "object": Recording()}, tmp_path / "code.ckpt")
    trainer = treadle.Trainer(**NO_OUTPUT)
    data = DataLoader(loader().dataset, 4)
    own = trainer.validate(task, data, verbose=False)
    assert trainer.validate(Task(), data, ckpt_path=tmp_path / "theirs.ckpt", verbose=False) == own
    with pytest.raises(ValueError, match="nothing that Treadle can resume from"):
        trainer.fit(Task(), loader(), ckpt_path=tmp_path / "theirs.ckpt")
    with pytest.raises(ValueError, match="no dict under the key 'state_dict'"):
        trainer.validate(Task(), loader(), ckpt_path=tmp_path / "other.ckpt")
    assert trainer.validate(Task(), data, ckpt_path=tmp_path / "code.ckpt", verbose=False) == own  # no code runs
    by_plugin = treadle.Trainer(plugins=Recording(), **NO_OUTPUT)
    with pytest.raises(ValueError, match="contains more than data"):
        by_plugin.validate(Task(), loader(), ckpt_path=tmp_path / "code.ckpt")


def test_a_plugin_cannot_take_what_needs_a_directory(tmp_path):
    def fit(**flags):
        trainer = treadle.Trainer(max_epochs=1, **flags, **NO_OUTPUT)
        trainer.fit(Task(), loader())
        trainer.accelerator.register_save_state_pre_hook(lambda *_: None)
        return trainer

    with pytest.raises(ValueError, match="the plugin Recording cannot save this checkpoint, because a hook of "):
        fit(plugins=Recording()).save_checkpoint(tmp_path / "c.ckpt")
    plain = fit()
    with pytest.raises(ValueError, match="format='file' cannot save this checkpoint, because a hook of "):
        plain.save_checkpoint(tmp_path / "c.ckpt", format="file")
    plain.save_checkpoint(tmp_path / "c.ckpt")
    assert (tmp_path / "c.ckpt").is_dir()
