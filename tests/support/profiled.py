"""A training that profilers measure, and a profiler that notes what it is told."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from treadle.engine.profilers.simple import Action

from support.models import LoggedLine
from support.trainers import make_trainer
from treadle.profilers import Profiler


def action(own, calls=10, first=0.0, device=0.0):
    one = Action()
    one.exclusive = one.total = own
    one.calls, one.first, one.device_exclusive = calls, first, device
    return one


class Net(LoggedLine):
    features = 4

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).mean())


def loader(count=16, **options):
    return DataLoader(TensorDataset(torch.randn(count, 4)), 2, **options)


def trainer_in(root, **flags):
    return make_trainer(default_root_dir=root, **flags)


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
