"""Tasks whose learning rate and batch size are searched for, and what a run of them leaves."""

import random

import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle
from support.differences import differences, whole
from support.trainers import NO_OUTPUT, make_trainer
from treadle.tuner import Tuner

QUIET_ON_CPU = {"accelerator": "cpu", **NO_OUTPUT}


class Task(treadle.TaskModule):
    """Has a bit of all that a search could leave a trace in."""

    def __init__(self, lr=0.05, batch_size=4, fits=10**9, only_on=None, broken_from=None):
        super().__init__()
        self.save_hyperparameters("lr", "batch_size")
        self.lr, self.batch_size = lr, batch_size
        self.fits, self.only_on, self.broken_from = fits, only_on, broken_from
        self.net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 1))
        self.error = torchmetrics.MeanSquaredError()
        self.data = dataset()
        self.noise = torch.Generator().manual_seed(5)
        self.calls, self.rates, self.sizes, self.losses = 0, [], [], []

    def training_step(self, batch, index):
        self.calls += 1
        x, y = batch
        self.sizes.append(len(x))
        if len(x) > self.fits and (self.only_on is None or self.global_rank == self.only_on):
            raise MemoryError("no room")
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        loss = (self.net(x) - y).pow(2).mean() + 0 * random.random() + 0 * np.random.rand()
        loss = loss * (1 + 0.01 * torch.rand((), generator=self.noise))
        if self.broken_from is not None and self.calls >= self.broken_from:
            loss = loss * float("nan")
        self.error.update(self.net(x).detach(), y)
        self.log("loss", loss)
        self.log("error", self.error, on_epoch=True, on_step=False)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch):
        self.log("val", (self.net(batch[0]) - batch[1]).pow(2).mean())

    def train_dataloader(self):
        return DataLoader(self.data, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, self.batch_size)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def dataset(count=32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, generator=generator))


def trace(finders, *, tuner=None, kind=Task, given=None, **flags):
    """A short fit; returns all that a search before it could have changed."""
    treadle.seed_everything(0)
    task = kind()
    trainer = make_trainer(max_epochs=2, callbacks=finders, log_every_n_steps=1, **flags)
    if tuner is not None:
        tuner(Tuner(trainer), task)
    trainer.fit(task, given)
    optimizer = trainer.optimizers[0]
    everything = {
        "weights": {name: whole(value) for name, value in task.state_dict().items()},
        "optimizer": [
            {key: whole(value) for key, value in state.items()} for state in optimizer.state_dict()["state"].values()
        ],
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1], task.noise.get_state()),
        "progress": (trainer.progress.step, trainer.progress.epoch, trainer.progress.samples),
        "logged": trainer.callback_metrics,
        "metric": task.error.metric_state,
        "task": (task.calls, task.losses, task.sizes, task.lr, task.batch_size, dict(task.hparams)),
        "accumulate": trainer.accumulate_grad_batches,
    }
    return everything


class Data(treadle.DataModule):
    def __init__(self, batch_size=4):
        super().__init__()
        self.save_hyperparameters()
        self.data = dataset()

    def train_dataloader(self):
        return DataLoader(self.data, self.hparams.batch_size, shuffle=True)


class Unbuilt(Task):
    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.2), nn.Linear(5, 1))


def check(a, b):
    assert differences(a, b) == []


class Plain(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        self.learning_rate = 0.1
        self.net = nn.Linear(3, 1)
        self.seen = []

    def training_step(self, batch):
        return (self.net(batch[0]) - batch[1]).pow(2).mean()

    def on_train_start(self):
        self.seen.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.learning_rate)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]
