"""When the loop steps schedulers, and with which values."""

import pytest
import torch
from support.models import Count, Line, loader, optimize
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from treadle.callbacks import ModelCheckpoint


class Plateau(Line):
    """Its k-th validation logs ``values[k]``; ``fed`` are the values with which the scheduler stepped, by step."""

    features = 1

    def __init__(self, values, fails_at=None, **config):
        super().__init__()
        self.values, self.fails_at, self.config = values, fails_at, {"monitor": "val", **config}
        self.register_buffer("rounds", torch.tensor(0))
        self.fed, self.rates = [], []

    def training_step(self, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return 0 * self.net(batch[0]).sum()

    def validation_step(self, batch, batch_idx):
        if self.rounds == self.fails_at:
            raise RuntimeError("failed on purpose")

    def on_validation_epoch_end(self):
        self.log("val", float(self.values[self.rounds]))
        self.rounds += 1

    def lr_scheduler_step(self, scheduler, metric):
        self.fed.append((self.global_step, metric))
        super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.config}}


VALUES = [9, 1, 2, 1, 3, 0, 4, 5]  # of the validations after steps 2, 4, ...


def fit(task, *callbacks, ckpt_path=None, **flags):
    defaults = {"max_epochs": 4, "val_check_interval": 2, "num_sanity_val_steps": 0}
    saves = {"callbacks": list(callbacks), "enable_checkpointing": bool(callbacks)}
    trainer = make_trainer(**{**defaults, **saves, **flags})
    train, val = (loader(4 * trainer.world_size, batch_size, features=1) for batch_size in (1, 4))
    trainer.fit(task, train, val, ckpt_path=ckpt_path)
    return task


def rates_by_hand(fed, steps=16):
    """The rate of each step in a plain loop that steps the scheduler with these values after these steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    scheduler, rates = ReduceLROnPlateau(optimizer, factor=0.5, patience=0), []
    for step in range(1, steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        if step in fed:
            scheduler.step(fed[step])
    return rates


@pytest.mark.parametrize(
    ("config", "fed"),
    [
        ({"interval": "step", "frequency": 2}, dict(zip(range(2, 17, 2), VALUES, strict=True))),
        ({"interval": "step", "frequency": 4}, dict(zip(range(4, 17, 4), VALUES[1::2], strict=True))),
        ({"interval": "step", "strict": False}, {step: VALUES[step // 2 - 1] for step in range(2, 17)}),
        ({"interval": "epoch"}, dict(zip(range(4, 17, 4), VALUES[1::2], strict=True))),
        ({"interval": "epoch", "frequency": 2}, {8: VALUES[3], 16: VALUES[7]}),
    ],
)
def test_a_plateau_scheduler_is_fed_the_validation_of_its_own_step(config, fed):
    task = fit(Plateau(VALUES, **config))
    assert dict(task.fed) == fed
    assert len(task.fed) == len(fed)
    assert task.rates == rates_by_hand(fed)


def test_a_plateau_scheduler_by_step_in_a_run_that_goes_on(tmp_path):
    config = {"interval": "step", "frequency": 2}
    whole = fit(Plateau(VALUES, **config), ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=1, filename="x"))
    assert len(whole.fed) == 8
    for step in (5, 6, 8):  # the sixth step's checkpoint contains the rate after its validation
        folder = tmp_path / str(step)
        fit(Plateau(VALUES, **config), ModelCheckpoint(folder, every_n_train_steps=step), max_steps=step)
        (path,) = folder.iterdir()
        rest = fit(Plateau(VALUES, **config), ckpt_path=path)
        assert (rest.fed, rest.rates) == (whole.fed[step // 2 :], whole.rates[step:])
    keep = ModelCheckpoint(tmp_path / "failed", save_on_exception=True, every_n_epochs=9)
    with pytest.raises(RuntimeError, match="on purpose"):  # in the validation of step 6, which is repeated
        fit(Plateau(VALUES, fails_at=2, **config), keep)
    (path,) = (tmp_path / "failed").iterdir()
    rest = fit(Plateau(VALUES, **config), ckpt_path=path)
    assert (rest.fed, rest.rates) == (whole.fed[2:], whole.rates[6:])


class Leaves(Line):
    features = 1

    def __init__(self, at):
        super().__init__()
        self.at, self.rates = at, []

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == self.at else None

    def on_train_epoch_end(self):
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        return [optimizer], [ExponentialLR(optimizer, 0.5)]


def on_each_rank():
    task = fit(Plateau(VALUES, interval="step", frequency=2), devices=2, strategy="ddp")
    assert dict(task.fed) == dict(zip(range(2, 17, 2), VALUES, strict=True))
    for at in (0, 2):
        left = fit(Leaves(at), devices=2, strategy="ddp", limit_val_batches=0)
        assert left.rates == [0.5, 0.25, 0.125, 0.0625]


@pytest.mark.parametrize("at", [0, 2])
def test_an_epoch_that_a_hook_ends_counts_for_schedulers_by_epoch(at):
    assert fit(Leaves(at), limit_val_batches=0).rates == [0.5, 0.25, 0.125, 0.0625]


@pytest.mark.long
def test_on_two_processes():
    run(on_each_rank, 2)


class WithoutStep(Count):
    """A scheduler that training_step steps in its own way."""

    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer


def test_a_scheduler_without_step_is_for_manual_optimization(tmp_path):
    class Task(Leaves):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.lr_schedulers().value += 1
            return optimize(self, super().training_step(batch, batch_idx))

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 1.0)
            return [optimizer], [WithoutStep(optimizer)]

    kept, task = ModelCheckpoint(tmp_path), Task(at=None)
    fit(task, kept, limit_val_batches=0, max_epochs=2)
    assert task.lr_schedulers().value == 8
    task = fit(Task(at=None), ckpt_path=kept.best_model_path, limit_val_batches=0, max_epochs=3)
    assert task.lr_schedulers().value == 12
    task.automatic_optimization = True
    with pytest.raises(TypeError, match=r"has no step\(\)"):
        fit(task, limit_val_batches=0)
