"""What new users stumbled over: each is said, or does what they meant."""

import os
import shutil
import warnings
from argparse import Namespace

import pytest
import torch
from support.failing_runs import Fails
from support.models import Scored
from support.trainers import make_trainer, says
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import ModelCheckpoint
from treadle.engine.checkpoint import store as checkpoint


class Task(Scored):
    def __init__(self, args=None, lr=0.1):
        torch.manual_seed(0)
        super().__init__()
        self.save_hyperparameters()


def loader(count=10):
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), batch_size=2)


def fit(root, *callbacks, task=None, train=None, ckpt_path=None, **flags):
    defaults = {"max_epochs": 2, "default_root_dir": root, "enable_checkpointing": None}
    trainer = make_trainer(**defaults | flags, callbacks=list(callbacks))
    trainer.fit(Task() if task is None else task, train or loader(), loader(2), ckpt_path=ckpt_path)
    return trainer


def test_an_interrupt_after_a_step_saves_that_step_as_the_last(tmp_path):
    kept = ModelCheckpoint(tmp_path / "c", save_last=True, save_on_exception=True)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, kept, Fails("batch_end", 7, KeyboardInterrupt))
    assert sorted(os.listdir(tmp_path / "c")) == ["epoch=0-step=5.ckpt", "last.ckpt"]
    assert checkpoint.read_manifest(tmp_path / "c" / "last.ckpt").step == 7
    whole, again = Task(), Task()
    fit(tmp_path, task=whole, enable_checkpointing=False)
    fit(tmp_path, ModelCheckpoint(tmp_path / "c", save_last=True), task=again, ckpt_path=tmp_path / "c" / "last.ckpt")
    assert [p.tolist() for p in again.parameters()] == [p.tolist() for p in whole.parameters()]
    assert sorted(os.listdir(tmp_path / "c")) == ["epoch=1-step=10.ckpt", "last.ckpt"]


def test_a_value_that_was_never_measured_is_not_zero_in_a_name(tmp_path):
    kept = ModelCheckpoint(tmp_path, "{step}-{val_loss:.3f}", "val_loss", save_on_exception=True)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, kept, Fails("batch_end", 2, KeyboardInterrupt))
    assert os.listdir(tmp_path) == ["step=2-val_loss=nan.ckpt"]


def test_a_folder_that_was_moved_is_the_same_folder(tmp_path):
    def kept(folder):
        return ModelCheckpoint(tmp_path / folder, "{step}", "val_loss", save_top_k=2, save_last=True)

    fit(tmp_path, kept("a"))
    shutil.move(tmp_path / "a", tmp_path / "b")
    again = kept("b")
    fit(tmp_path, again, max_epochs=4, ckpt_path=tmp_path / "b" / "last.ckpt")
    assert sorted(os.listdir(tmp_path / "b")) == ["last.ckpt", "step=15.ckpt", "step=20.ckpt"]
    assert checkpoint.read_manifest(tmp_path / "b" / "last.ckpt").step == 20


def test_a_namespace_as_an_argument_is_data(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task = Task(Namespace(width=3, inner=Namespace(depth=2)))
    trainer = fit(tmp_path, task=task)
    trainer.save_checkpoint(tmp_path / "c")
    again = Task.load_from_checkpoint(tmp_path / "c", lr=0.3)
    assert (again.hparams.args.width, again.hparams.args.inner.depth, again.hparams.lr) == (3, 2, 0.3)


def test_what_fits_is_taken_of_another_set_up(tmp_path):
    class Scheduled(Task):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    fit(tmp_path, ModelCheckpoint(tmp_path / "c"), task=Scheduled())
    with pytest.raises(ValueError, match="contains 1 scheduler, but this run has 0"):
        fit(tmp_path, ckpt_path=tmp_path / "c" / "epoch=1-step=10.ckpt", max_epochs=3)
    plain = Task()
    plain.strict_loading = False
    with pytest.warns(UserWarning, match="contains 1 scheduler, but this run has 0, so schedulers are not restored"):
        trainer = fit(tmp_path, task=plain, ckpt_path=tmp_path / "c" / "epoch=1-step=10.ckpt", max_epochs=3)
    assert trainer.global_step == 15


def test_a_path_that_is_nearly_right(tmp_path):
    fit(tmp_path, ModelCheckpoint(tmp_path / "checkpoints"))
    for folder, name in ((tmp_path / "checkpoints", "epoch=1-step=10"), (tmp_path, "checkpoints/epoch=1-step=10")):
        with says(ValueError, "is a folder of checkpoints, not a checkpoint", "Pass the path of one", name):
            fit(tmp_path, ckpt_path=folder)


def test_how_many_steps_are_to_come_after_the_batches_have_changed(tmp_path, caplog):
    fit(tmp_path, ModelCheckpoint(tmp_path / "c", every_n_train_steps=8))
    flags = {"max_epochs": 3, "train": DataLoader(loader().dataset, 1)}
    with pytest.warns(UserWarning, match="global batch"):
        trainer = fit(tmp_path, ckpt_path=tmp_path / "c" / "epoch=1-step=8.ckpt", **flags)
    said = [record.getMessage() for record in caplog.records if "are done" in record.getMessage()]
    assert f"{trainer.global_step} optimizer steps" in said[-1]
