"""Keys in what `configure_optimizers` returns: those that are read, and the others."""

import pytest
import torch
from support.models import Line, loader
from support.trainers import make_trainer


def fit(scheduler_extra=None, **extra):
    task, run = Line(), make_trainer()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    scheduler = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), **(scheduler_extra or {})}
    task.configure_optimizers = lambda: {"optimizer": optimizer, "lr_scheduler": scheduler, **extra}
    run.fit(task, loader())
    return run


def test_keys_that_nobody_reads_are_warned_of():
    with pytest.warns(UserWarning, match=r"a dict with the key 'scheduler', which is ignored.* mean 'lr_scheduler'"):
        run = fit(scheduler=None)
    assert len(run.lr_scheduler_configs) == 1
    with pytest.warns(UserWarning, match=r"an lr_scheduler dict with the key 'tracker', which is ignored"):
        run = fit({"tracker": 1})
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_typing_error_stays_an_error():
    with pytest.raises(ValueError, match=r"'lr_schedular'.*Did you mean 'lr_scheduler'"):
        fit(lr_schedular=None)
    with pytest.raises(ValueError, match=r"'intervall'.*Did you mean 'interval'"):
        fit({"intervall": "step"})


class Plateau(Line):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=8.0)
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)]


class ByHand(Plateau):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()

    def on_train_epoch_end(self):
        self.lr_schedulers().step(1.0)


def test_a_plateau_scheduler_that_the_task_steps_needs_no_monitor():
    run = make_trainer(max_epochs=3)
    run.fit(ByHand(), loader())
    assert run.optimizers[0].param_groups[0]["lr"] == 2.0
    with pytest.raises(ValueError, match="needs a monitor"):
        make_trainer().fit(Plateau(), loader())


def test_the_frequency_of_a_schedule_counts_optimizer_steps_of_the_run():
    class EachSecond(Line):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=8.0)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 2}]

    run = make_trainer(max_epochs=2, accumulate_grad_batches=2)
    run.fit(EachSecond(), loader(6, 1))
    assert (run.global_step, run.optimizers[0].param_groups[0]["lr"]) == (6, 1.0)
