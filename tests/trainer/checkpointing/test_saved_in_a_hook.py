"""Checkpoints that a hook makes: a run goes on from each as if it had never stopped, or none is made."""

import pytest
import torch
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import Callback, EarlyStopping

import treadle


class Task(treadle.TaskModule):
    """Logs a value every fifth batch; its scheduler watches that, after every step."""

    monitor = "seldom"

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.seen = []

    def training_step(self, batch, batch_idx):
        if batch_idx % 5 == 0:
            self.log("seldom", float(batch_idx + self.current_epoch))
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).square().mean())

    def on_validation_end(self):
        self.seen.append(self.global_step)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
        lr_scheduler = {"scheduler": scheduler, "interval": "step", "monitor": "seldom"}
        return {"optimizer": optimizer, "lr_scheduler": lr_scheduler}


class Save(Callback):
    """Saves in one hook, the first time it is called after ``step`` optimizer steps."""

    def __init__(self, hook, step, path):
        self.step, self.path, self.done = step, path, False
        setattr(self, hook, self.save)

    def save(self, trainer, *_):
        if trainer.progress.step == self.step and not trainer.sanity_checking and not self.done:
            self.done = True
            trainer.save_checkpoint(self.path)


def loader():
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x), batch_size=4, shuffle=True)


def fit(*callbacks, ckpt_path=None, **flags):
    treadle.seed_everything(5)
    task = Task()
    trainer = make_trainer(callbacks=list(callbacks), **{"max_epochs": 2, "val_check_interval": 4} | flags)
    trainer.fit(task, loader(), loader(), ckpt_path=ckpt_path)
    return task, trainer


def state_of(task, trainer):
    scheduler = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    return [p.tolist() for p in task.parameters()], scheduler, trainer.callback_metrics


AFTER = ["on_train_batch_end", "on_step_end"]
VALIDATION = ["on_validation_start", "on_validation_epoch_start", "on_validation_end"]


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("hook", "step"),
    [
        pytest.param(hook, step, marks=() if step == 8 else pytest.mark.exhaustive)
        for hooks, steps in ((AFTER, (4, 7, 8)), (VALIDATION, (4, 8)))
        for hook in hooks
        for step in steps
    ],
)
def test_a_run_goes_on_from_it(tmp_path, hook, step):
    whole = fit()
    fit(Save(hook, step, tmp_path / "c"))
    task, trainer = fit(ckpt_path=tmp_path / "c")
    assert state_of(task, trainer) == state_of(*whole)
    redone = step != 7 and hook not in ("on_step_end", "on_validation_end")
    # Its last hook was on_validation_end's, the task's own, which comes after the callbacks'.
    assert task.seen == [s for s in whole[0].seen if s > step or (redone and s == step)]


WITHIN = ["on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_before_zero_grad"]


@pytest.mark.parametrize("hook", WITHIN)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_in_the_middle_of_a_step_none_is_made(tmp_path, hook, accumulate):
    with pytest.raises(ValueError, match=r"middle of optimizer step 3, .* on_step_end, .*weights_only=True"):
        fit(Save(hook, 2, tmp_path / "c"), accumulate_grad_batches=accumulate, max_epochs=1)
    assert not (tmp_path / "c").exists()


def two_processes(root):
    """A step's value that nobody has read yet is in the checkpoint, whatever number of processes goes on."""
    _, trainer = fit(Save("on_step_end", 3, root / "two"), max_epochs=1)
    return trainer.callback_metrics["seldom"].item()


def test_what_was_logged_last_goes_with_it(tmp_path):
    whole = run(two_processes, 2, tmp_path)
    assert whole[0] == whole[1]
    _, trainer = fit(max_steps=4, max_epochs=-1, ckpt_path=tmp_path / "two")
    assert trainer.callback_metrics["seldom"].item() == 0.0


def test_time_runs_out_while_every_step_validates(tmp_path):
    _, trainer = fit(max_time={"seconds": 0.3}, max_epochs=-1, val_check_interval=1)
    assert trainer.progress.batch != 0 or trainer.progress.step % 8 == 0
    assert 0.3 <= trainer.progress.seconds < 3


class SameName(Task):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", 100.0)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("loss", 1.0)


def test_of_a_name_that_both_log_the_newest_counts(tmp_path):
    stopping = EarlyStopping("loss", check_on_train_epoch_end=True)
    trainer = make_trainer(callbacks=[stopping])
    trainer.fit(SameName(), loader(), loader())
    assert trainer.callback_metrics["loss"] == stopping.best_score == 1.0
