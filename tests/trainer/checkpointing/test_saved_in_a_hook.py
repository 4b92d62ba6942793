"""Checkpoints that a hook makes: a run goes on from each as if it had never stopped, or none is made."""

import functools

import pytest
import torch
from support.callback_runs import Rows
from support.models import SaveIn
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.trainer.loop.progress import Phase

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
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).square().mean())

    def on_validation_end(self):
        self.seen.append(self.global_step)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
        lr_scheduler = {"scheduler": scheduler, "interval": "step", "monitor": "seldom"}
        return {"optimizer": optimizer, "lr_scheduler": lr_scheduler}


def loader():
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x), batch_size=4, shuffle=True)


def fit(*callbacks, ckpt_path=None, **flags):
    treadle.seed_everything(5)
    task = Task()
    flags = {"max_epochs": 2, "val_check_interval": 4, "logger": Rows(), "log_every_n_steps": 1} | flags
    trainer = make_trainer(callbacks=list(callbacks), **flags)
    trainer.fit(task, loader(), loader(), ckpt_path=ckpt_path)
    return task, trainer


def state_of(task, trainer):
    """What a resumed run has in common with the uninterrupted one at its end."""
    scheduler = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    curves = {name: curve.points() for name, curve in trainer.history.items()}
    return [p.tolist() for p in task.parameters()], scheduler, trainer.callback_metrics, curves, torch.rand(2).tolist()


@functools.cache
def whole():
    """The uninterrupted run: its state, and the steps at which it validated and logged."""
    task, trainer = fit()
    return state_of(task, trainer), task.seen, [step for step, _ in trainer.logger.of("loss_step")]


# An epoch has 8 steps, each fourth of which is followed by a validation.
PLACES = [
    *(("on_train_batch_end", step, Phase.STEP_TAKEN) for step in (4, 7, 8)),
    *(("on_validation_start", step, Phase.ENDING_STEP) for step in (4, 8)),
    *(("on_validation_epoch_start", step, Phase.ENDING_STEP) for step in (4, 8)),
    *(("on_validation_end", step, Phase.ENDING_STEP) for step in (4, 8)),
    *(("on_step_end", step, Phase.BETWEEN_STEPS) for step in (4, 7)),
    ("on_step_end", 8, Phase.EPOCH_TRAINED),
    ("on_train_epoch_end", 8, Phase.EPOCH_END),
]


@pytest.mark.guarantee
@pytest.mark.parametrize(("hook", "step", "phase"), PLACES)
def test_a_run_goes_on_from_it(tmp_path, hook, step, phase):
    save = SaveIn(hook, step, tmp_path / "c")
    fit(save)
    assert save.phase is phase
    task, trainer = fit(ckpt_path=tmp_path / "c")
    found, (state, validated, logged) = state_of(task, trainer), whole()
    assert found == state
    is_logged = hook != "on_train_batch_end"
    assert [at for at, _ in trainer.logger.of("loss_step")] == [at for at in logged if at > step - (not is_logged)]
    # The task notes a validation in on_validation_end, which comes after the callbacks' hook.
    is_repeated = step != 7 and hook not in ("on_step_end", "on_validation_end", "on_train_epoch_end")
    assert task.seen == [at for at in validated if at > step - is_repeated]


WITHIN = ["on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_before_zero_grad"]


@pytest.mark.parametrize("hook", WITHIN)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_in_the_middle_of_a_step_none_is_made(tmp_path, hook, accumulate):
    with pytest.raises(ValueError, match=r"middle of optimizer step 3, .* on_step_end, .*weights_only=True"):
        fit(SaveIn(hook, 2, tmp_path / "c"), accumulate_grad_batches=accumulate, max_epochs=1)
    assert not (tmp_path / "c").exists()


def two_processes(root):
    """A step's value that nobody has read yet is in the checkpoint, whatever number of processes goes on."""
    _, trainer = fit(SaveIn("on_step_end", 3, root / "two"), max_epochs=1)
    return trainer.callback_metrics["seldom"].item()


def test_what_was_logged_last_goes_with_it(tmp_path):
    whole = run(two_processes, 2, tmp_path)
    assert whole[0] == whole[1]
    _, trainer = fit(max_steps=4, max_epochs=-1, ckpt_path=tmp_path / "two")
    assert trainer.callback_metrics["seldom"].item() == 0.0


def test_time_runs_out_while_every_step_validates_and_is_up_in_a_resumed_run(tmp_path):
    flags = {"max_time": {"seconds": 0.3}, "max_epochs": -1, "val_check_interval": 1}
    _, trainer = fit(**flags)
    assert trainer.progress.batch != 0 or trainer.progress.step % 8 == 0
    assert 0.3 <= trainer.progress.seconds < 3
    trainer.save_checkpoint(tmp_path / "c")
    _, resumed = fit(**flags, ckpt_path=tmp_path / "c")
    assert resumed.global_step <= trainer.global_step + 1
