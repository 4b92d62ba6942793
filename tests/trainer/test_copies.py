"""Copies of a Trainer, of a data module and of what refers to them, made by pickle and deepcopy."""

import copy
import pickle

import pytest
import torch
from support.models import Scored, loader
from support.processes import run, script
from support.trainers import make_trainer
from torch.utils.data import DataLoader
from treadle.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from treadle.compat.demos.boring_classes import BoringModel

import treadle


class Task(Scored):
    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]


def by_pickle(value):
    return pickle.loads(pickle.dumps(value))


COPIES = pytest.mark.parametrize("make", [by_pickle, copy.deepcopy])


@COPIES
def test_a_copy_holds_flags_callbacks_and_values_and_can_go_on(tmp_path, make):
    callbacks = [ModelCheckpoint(monitor="val_loss"), EarlyStopping("val_loss"), TQDMProgressBar()]
    flags = {"logger": treadle.loggers.CSVLogger(tmp_path), "enable_progress_bar": True, "enable_checkpointing": True}
    trainer = make_trainer(max_epochs=2, callbacks=callbacks, **flags)
    task = Task()
    trainer.fit(task, loader(8), loader(8))
    copied = make(trainer)
    assert "accelerator" not in vars(copied)  # no process group, thread or signal handler yet
    assert (copied.max_epochs, copied.current_epoch, copied.global_step) == (2, 2, 8)
    for name in ("callback_metrics", "logged_metrics", "log_dir"):
        assert getattr(copied, name) == getattr(trainer, name)
    assert list(copied.history["val_loss"].values) == list(trainer.history["val_loss"].values)
    saving, saved = trainer.checkpoint_callback, copied.checkpoint_callback
    assert saved.best_model_path == saving.best_model_path
    assert saved.best_model_score == saving.best_model_score
    assert copied.early_stopping_callbacks[0].state_dict() == trainer.early_stopping_callbacks[0].state_dict()
    assert saved is not saving
    assert copied.loggers[0] is not trainer.loggers[0]
    assert torch.equal(copied.lightning_module.net.weight, task.net.weight)
    expected = trainer.test(task, loader(8), verbose=False)
    best = trainer.test(Task(), loader(8), ckpt_path="best", verbose=False)
    assert copied.test(Task(), loader(8), ckpt_path="best", verbose=False) == best
    assert copied.test(copied.lightning_module, loader(8), verbose=False) == expected

    trainer.fit_loop.max_epochs = copied.fit_loop.max_epochs = 3
    other = copy.deepcopy(task)
    trainer.fit(task, loader(8), loader(8))
    copied.fit(other, loader(8), loader(8))
    assert torch.equal(other.net.weight, task.net.weight)
    assert copied.global_step == trainer.global_step == 12


@COPIES
def test_an_unused_trainer_and_a_shallow_copy(tmp_path, make):
    trainer = make_trainer(accumulate_grad_batches=2, precision="bf16-mixed")
    copied, task = make(trainer), Task()
    assert copied.precision == "bf16-mixed"
    assert copied.accumulate_grad_batches == 2
    copied.fit(task, loader(8))
    assert copied.global_step == 2
    assert trainer.global_step == 0
    assert copy.copy(trainer).accelerator is trainer.accelerator
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'nonsense'"):
        _ = copied.nonsense


class CopiesWithin(treadle.Callback):
    def __init__(self):
        self.copies = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.copies += [by_pickle(trainer.callbacks[1:]), copy.deepcopy(trainer.callbacks[1:])]

    def on_train_epoch_end(self, trainer, pl_module):
        self.copies.append(copy.deepcopy(trainer))


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_copies_within_a_run(tmp_path, kind):
    within = CopiesWithin()
    trainer = make_trainer(callbacks=[within, kind()], default_root_dir=tmp_path, enable_progress_bar=True)
    trainer.fit(Task(), loader(8), loader(8))
    *bars, copied = within.copies
    assert [type(bar[0]) for bar in bars] == [kind, kind]
    assert all("accelerator" not in vars(bar[0].trainer) for bar in bars)
    assert copied.global_step == 4
    assert copied.stage is None
    copied.fit(Task(), loader(8), loader(8))


class Data(treadle.DataModule):
    def collate(self, samples):
        assert self.trainer is None  # a worker has none
        return [torch.stack(samples)]

    def train_dataloader(self):
        rows = torch.arange(16.0).view(8, 2).unbind()
        return DataLoader(rows, batch_size=2, num_workers=1, multiprocessing_context="spawn", collate_fn=self.collate)

    def test_dataloader(self):
        return loader()


@pytest.mark.long
def test_a_data_module_goes_to_spawned_workers(tmp_path):
    task, data = Task(), Data()
    trainer = make_trainer()
    trainer.fit(task, datamodule=data)
    assert trainer.global_step == 4
    assert data.trainer is trainer
    for copied in (by_pickle(data), copy.deepcopy(data)):
        assert copied.trainer is None
        assert len(trainer.test(task, datamodule=copied, verbose=False)) == 1


def copy_in_ranks(folder):
    trainer = make_trainer(devices=2, default_root_dir=folder)
    trainer.fit(Task(), loader(8))
    copied, results = copy.deepcopy(trainer), []
    assert copied.callback_metrics == trainer.callback_metrics
    for used in (trainer, copied):
        torch.manual_seed(1)
        task = Task()
        used.fit_loop.max_epochs = 2
        used.fit(task, loader(8))
        results.append((used.world_size, used.global_step, task.net.weight.detach().clone()))
    boring = make_trainer(max_steps=1, devices=2, default_root_dir=folder)
    boring.fit(BoringModel())
    return results, pickle.dumps(boring)  # of classes that any process can import


@pytest.mark.long
def test_a_copy_on_two_processes(tmp_path):
    ranks = run(copy_in_ranks, 2, str(tmp_path))
    for results, _ in ranks:
        (size, steps, weight), (copied_size, copied_steps, copied_weight) = results
        assert (size, steps) == (copied_size, copied_steps) == (2, 4)
        assert torch.equal(weight, copied_weight)
        assert torch.equal(weight, ranks[0][0][0][2])
    path = tmp_path / "trainer.pkl"
    path.write_bytes(ranks[0][1])
    # Reading a copy starts no processes, although its flag is devices=2.
    program = f"import pickle\ntrainer = pickle.load(open({str(path)!r}, 'rb'))\n"
    done = script(program + "print(trainer.global_step, trainer.callback_metrics, 'accelerator' in vars(trainer))")
    assert done.stdout.strip() == "1 {} False", done.stderr
