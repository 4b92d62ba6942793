"""Keys in what `configure_optimizers` returns: those that are read, and the others."""

import pytest
import torch
from support.models import Line, loader
from support.trainers import make_trainer
from torch.utils.data import DataLoader, TensorDataset


class Task(Line):
    def __init__(self, extra=None, scheduler_extra=None):
        super().__init__()
        self.extra, self.scheduler_extra = extra or {}, scheduler_extra or {}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.scheduler_extra}, **self.extra}


def fit(task):
    run = make_trainer()
    run.fit(task, loader())
    return run


def test_keys_that_nobody_reads_are_warned_of():
    with pytest.warns(UserWarning, match=r"a dict with the key 'scheduler', which is ignored.* mean 'lr_scheduler'"):
        run = fit(Task({"scheduler": None}))
    assert len(run.lr_scheduler_configs) == 1
    with pytest.warns(UserWarning, match=r"an lr_scheduler dict with the key 'tracker', which is ignored"):
        run = fit(Task(scheduler_extra={"tracker": 1}))
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_typing_error_stays_an_error():
    with pytest.raises(ValueError, match=r"'lr_schedular'.*Did you mean 'lr_scheduler'"):
        fit(Task({"lr_schedular": None}))
    with pytest.raises(ValueError, match=r"'intervall'.*Did you mean 'interval'"):
        fit(Task(scheduler_extra={"intervall": "step"}))


class ByHand(Line):
    """Steps a plateau scheduler itself, and each second batch's schedule is the loop's."""

    def __init__(self, automatic):
        super().__init__()
        self.automatic_optimization = automatic

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def on_train_epoch_end(self):
        if not self.automatic_optimization:
            self.lr_schedulers().step(1.0)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=8.0)
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)]


def test_a_plateau_scheduler_that_the_task_steps_needs_no_monitor():
    data = DataLoader(TensorDataset(torch.zeros(2, 2)))
    run = make_trainer(max_epochs=3)
    run.fit(ByHand(automatic=False), data)
    assert run.optimizers[0].param_groups[0]["lr"] == 2.0
    with pytest.raises(ValueError, match="needs a monitor"):
        make_trainer().fit(ByHand(automatic=True), data)


def test_the_frequency_of_a_schedule_counts_optimizer_steps_of_the_run():
    class EachSecond(ByHand):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=8.0)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 2}]

    run = make_trainer(max_epochs=2, accumulate_grad_batches=2)
    run.fit(EachSecond(automatic=True), DataLoader(TensorDataset(torch.zeros(6, 2))))
    assert (run.global_step, run.optimizers[0].param_groups[0]["lr"]) == (6, 1.0)
