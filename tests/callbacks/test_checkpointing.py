"""Which checkpoints a callback removes, when it is time for one, and the room for it."""

import errno
import os
import shutil
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from support.callback_runs import Steps, Tiny, fit, loader, names, trainer
from support.processes import RankError, run
from torch import nn
from treadle.callbacks import ModelCheckpoint
from treadle.engine.checkpoint import filesystem, store


def test_a_time_interval_asks_seldom_and_saves_when_it_is_over(tmp_path):
    kept = ModelCheckpoint(tmp_path / "c", train_time_interval=timedelta(seconds=0.4), save_top_k=-1)
    began = time.monotonic()
    fit(tmp_path, kept, task=Tiny(pause=0.02), samples=100, max_epochs=1, validate=False)
    assert 2 <= len(names(tmp_path / "c")) <= max(2, (time.monotonic() - began) // 0.4)


@pytest.mark.parametrize("name", ["c/epoch=0-step=5.ckpt", "resume", "folder/epoch=0-step=5.ckpt"])
def test_what_is_resumed_from_is_not_removed(tmp_path, monkeypatch, name):
    first = ModelCheckpoint(tmp_path / "c")
    fit(tmp_path, first, max_epochs=1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resume").symlink_to(first.best_model_path)
    (tmp_path / "folder").symlink_to(tmp_path / "c")
    again = ModelCheckpoint("c")
    fit(tmp_path, again, max_epochs=4, ckpt_path=name)
    assert names(tmp_path / "c") == ["epoch=0-step=5.ckpt", "epoch=3-step=20.ckpt"]


def killed(root, name):
    """A run that is killed when the new checkpoint is in place and the one it replaces is about to be removed."""
    original = filesystem.rename

    def rename(source, target):
        if target.name.startswith(f".{name}.") and target.name.endswith(".gone"):
            os._exit(9)
        original(source, target)

    filesystem.rename = rename
    fit(Path(root), saving_best(root), values=[3.0, 2.0, 1.0], max_epochs=3)


def saving_best(root):
    return ModelCheckpoint(Path(root) / "c", "{epoch}", "val_loss", save_last=True)


@pytest.mark.guarantee
def test_killed_between_saving_and_removing(tmp_path):
    with pytest.raises(RankError):
        run(killed, 1, str(tmp_path), "epoch=1.ckpt")
    assert names(tmp_path / "c") == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
    again = saving_best(tmp_path)
    made = trainer(tmp_path, again, max_epochs=4)
    made.fit(Tiny([5.0]), loader(), loader(4), ckpt_path="last")
    assert names(tmp_path / "c") == ["epoch=2.ckpt", "last.ckpt"]
    assert (again.best_model_path, again.best_model_score) == (str(tmp_path / "c" / "epoch=2.ckpt"), 1.0)


def test_a_kept_one_that_somebody_removed_is_forgotten(tmp_path):
    first = ModelCheckpoint(tmp_path / "c", "{epoch}", "val_loss", save_top_k=2, save_last=True)
    fit(tmp_path, first, values=[1.0, 2.0])
    store.remove(tmp_path / "c" / "epoch=0.ckpt")
    again = ModelCheckpoint(tmp_path / "c", "{epoch}", "val_loss", save_top_k=2, save_last=True)
    fit(tmp_path, again, values=[3.0, 4.0], max_epochs=4, ckpt_path=first.last_model_path)
    assert again.best_model_path.endswith("epoch=1.ckpt")
    assert names(tmp_path / "c") == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]


def full(free):
    """In the place of `shutil.disk_usage`: a disk with so many bytes left."""
    return lambda path: shutil._ntuple_diskusage(10**9, 10**9 - free, free)


class Wide(Tiny):
    """10,000 weights in float32, some of them under two names."""

    def __init__(self, optimizer=torch.optim.SGD, **options):
        super().__init__()
        self.wide = nn.Linear(100, 100, bias=False)
        self.tied = self.wide
        self.options = optimizer, options

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.wide(torch.ones(100)).pow(2).mean()

    def configure_optimizers(self):
        optimizer, options = self.options
        return optimizer(self.parameters(), lr=0.1, **options)


@pytest.mark.parametrize(
    ("optimizer", "options", "copies"),
    [
        (torch.optim.SGD, {}, 1),
        pytest.param(torch.optim.SGD, {"momentum": 0.9}, 2, marks=pytest.mark.exhaustive),
        (torch.optim.AdamW, {}, 3),
        pytest.param(torch.optim.Adam, {"amsgrad": True}, 4, marks=pytest.mark.exhaustive),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}, 4),
        pytest.param(torch.optim.Adagrad, {}, 2, marks=pytest.mark.exhaustive),
        pytest.param(torch.optim.Adadelta, {}, 3, marks=pytest.mark.exhaustive),
    ],
)
def test_the_room_for_one_checkpoint_is_known_before_the_first_step(tmp_path, monkeypatch, optimizer, options, copies):
    """Never more than what is then written, and nearly as much."""
    task = Wide(optimizer, **options)
    needed = 4 * (10_000 + 3) * copies
    steps = Steps()
    monkeypatch.setattr(shutil, "disk_usage", full(free=needed - 1))
    with pytest.raises(OSError, match=rf"a checkpoint needs [0-9,]+ bytes, but only {needed - 1:,} are free") as caught:
        fit(tmp_path, steps, ModelCheckpoint(tmp_path / "c"), task=task)
    assert caught.value.errno == errno.ENOSPC
    assert list(steps.weights) == [0]
    assert names(tmp_path / "c") == []
    monkeypatch.setattr(shutil, "disk_usage", full(free=needed + 100))
    kept = ModelCheckpoint(tmp_path / "c")
    fit(tmp_path, kept, task=task)
    written = Path(kept.best_model_path).stat().st_size
    assert needed <= written < needed + 50_000
    weights = ModelCheckpoint(tmp_path / "w", save_weights_only=True)
    monkeypatch.setattr(shutil, "disk_usage", full(free=4 * (10_000 + 3)))
    fit(tmp_path, weights, task=task)


class Quantized(torch.optim.Optimizer):
    """An optimizer from elsewhere: nobody knows what it will keep."""

    def __init__(self, parameters, lr, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    def step(self, closure=None):
        pass


def test_of_an_unknown_optimizer_nothing_is_assumed(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", full(free=4 * (10_000 + 3)))
    saver = ModelCheckpoint(tmp_path / "c")
    fit(tmp_path, saver, task=Wide(Quantized))
    assert store.verify(saver.best_model_path).step > 0
