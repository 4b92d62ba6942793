"""A run whose weights are averaged, and its averages by hand."""

import torch
from torch import nn

import treadle
from support.callback_runs import loader, trainer
from support.differences import whole


class Task(treadle.TaskModule):
    """Notes its weights after each step and in each validation."""

    def __init__(self, fails=None):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.fails = fails
        self.trained, self.validated, self.tested = [], [], []

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean()

    def on_before_zero_grad(self, optimizer):
        self.trained.append(flat(self))

    def validation_step(self, batch, batch_idx):
        self.validated.append(flat(self))
        self.log("val_loss", self.net(batch[0]).mean())
        if self.fails is not None and self.global_step == self.fails:
            raise RuntimeError("planned")

    def test_step(self, batch, batch_idx):
        self.tested.append(flat(self))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


def flat(task):
    return torch.cat([whole(p.detach()).flatten() for p in task.parameters()]).clone()


def by_hand(weights, decay):
    average = weights[0]
    for value in weights[1:]:
        average = decay * average + (1 - decay) * value
    return average


def fit(root, *callbacks, task=None, samples=12, ckpt_path=None, **flags):
    task = task or Task()
    made = trainer(root, *callbacks, **flags)
    made.fit(task, loader(samples, 3), loader(2), ckpt_path=ckpt_path)
    return made, task
