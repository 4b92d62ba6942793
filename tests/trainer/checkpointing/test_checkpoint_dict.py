"""Checkpoints as one dict: written by a CheckpointIO plugin, or saved by another library."""

import os

import pytest
import torch
from safetensors.torch import save_file
from support.processes import run
from support.trainers import NO_OUTPUT
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import Callback, ModelCheckpoint
from treadle.trainer.checkpointing import resolve

import treadle
from treadle.plugins import AsyncCheckpointIO, TorchCheckpointIO


class Task(treadle.TaskModule):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Recording(TorchCheckpointIO):
    def __init__(self):
        self.calls = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.calls.append(("save", os.path.basename(path)))
        super().save_checkpoint(checkpoint, path)

    def load_checkpoint(self, path, *args, **options):
        self.calls.append(("load", os.path.basename(path)))
        return super().load_checkpoint(path, *args, **options)

    def remove_checkpoint(self, path):
        self.calls.append(("remove", os.path.basename(path)))
        super().remove_checkpoint(path)


def loader():
    return DataLoader(TensorDataset(torch.arange(128.0).view(32, 4) / 128), 4, shuffle=True)


def fitted(folder, epochs, plugin=None, ckpt_path=None, **flags):
    torch.manual_seed(1)
    task, keeps = Task(), ModelCheckpoint(folder, monitor="loss", save_last=True)
    trainer = treadle.Trainer(
        max_epochs=epochs, callbacks=keeps, plugins=plugin, **{**NO_OUTPUT, "enable_checkpointing": True, **flags}
    )
    trainer.fit(task, loader(), ckpt_path=ckpt_path)
    return task, trainer


def are_equal(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


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
    content = {name: value.clone() for name, value in InMemory.kept[last]["state_dict"].items()}
    assert are_equal(fitted(tmp_path / "cut", 4, InMemory(), last)[0], fitted(tmp_path / "whole", 4)[0])
    assert content


def two_ranks(folder):
    strategy = {"strategy": "ddp", "devices": 2}
    _, trainer = fitted(f"{folder}/cut", 2, TorchCheckpointIO(), **strategy)
    plugin = Recording()
    _, trainer = fitted(f"{folder}/plugin", 2, plugin, **strategy)
    resumed, _ = fitted(f"{folder}/plugin", 4, plugin, trainer.checkpoint_callback.last_model_path, **strategy)
    whole, _ = fitted(f"{folder}/whole", 4, **strategy)
    return are_equal(resumed, whole), [name for call, name in plugin.calls if call == "save"]


def test_two_ranks(tmp_path):
    (first, saves), (second, none) = run(two_ranks, 2, str(tmp_path))
    assert first is second is True
    assert saves
    assert none == []


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


def test_hooks_see_the_dict_and_what_they_change_is_written(tmp_path):
    class Hooks(Callback):
        def on_save_checkpoint(self, trainer, task, checkpoint):
            self.seen = set(checkpoint)
            if "optimizer_states" in checkpoint:
                checkpoint["optimizer_states"][0]["mine"] = "kept"
            checkpoint["more"] = torch.ones(2)
            checkpoint["state_dict"]["net.0.bias"] = torch.zeros(4)
            checkpoint.pop("lr_schedulers", None)

        def on_load_checkpoint(self, trainer, task, checkpoint):
            self.loaded = checkpoint["more"]

    hooks, path = Hooks(), tmp_path / "c.ckpt"
    trainer = treadle.Trainer(max_epochs=1, callbacks=hooks, **NO_OUTPUT)
    trainer.fit(Task(), loader())
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    assert hooks.seen >= {"state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "hyper_parameters"}
    assert content["optimizer_states"][0]["mine"] == "kept"
    assert "lr_schedulers" not in content
    assert torch.equal(content["more"], torch.ones(2))
    assert content["state_dict"]["net.0.bias"].count_nonzero() == 0
    resumed = treadle.Trainer(max_epochs=2, callbacks=hooks, **NO_OUTPUT)
    resumed.fit(Task(), loader(), ckpt_path=path)
    assert torch.equal(hooks.loaded, torch.ones(2))
    connector = resumed._checkpoint_connector
    assert set(connector.dump_checkpoint(weights_only=True)) < set(connector.dump_checkpoint())
    assert resumed._checkpoint_connector.dump_checkpoint()["global_step"] == 16


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


def test_names_are_compared_before_a_file_of_another_library_is_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(resolve, "open_dict", lambda *_: pytest.fail("it is copied"))
    save_file({"other": torch.ones(1)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"w\.safetensors was saved by a different model:\n  missing: net\.0\.bias"):
        treadle.Trainer(**NO_OUTPUT).validate(Task(), loader(), ckpt_path=tmp_path / "w.safetensors")
