"""A training that profilers measure, and a profiler that notes what it is told."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.engine.profilers.simple import Action

import treadle as tl
from support.models import SGDTask
from treadle.profilers import Profiler


def action(own, calls=10, first=0.0, device=0.0):
    one = Action()
    one.exclusive = one.total = own
    one.calls, one.first, one.device_exclusive = calls, first, device
    return one


class Net(SGDTask):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).mean())


def loader(count=16, **options):
    return DataLoader(TensorDataset(torch.randn(count, 4)), 2, **options)


def trainer_in(root, **flags):
    defaults = {"max_epochs": 1, "logger": False, "accelerator": "cpu"}
    off = {f"enable_{name}": False for name in ("progress_bar", "checkpointing", "model_summary")}
    return tl.Trainer(default_root_dir=root, **{**off, **defaults, **flags})


class Notes(Profiler):
    """Writes down what begins and ends."""

    def __init__(self):
        super().__init__()
        self.events = []

    def start(self, action_name):
        self.events.append(("start", action_name))

    def stop(self, action_name):
        self.events.append(("stop", action_name))

    def step(self):
        self.events.append(("step", ""))
