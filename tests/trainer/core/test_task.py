"""A TaskModule inside a TaskModule knows the Trainer that runs the outer one."""

import copy
import pickle

import pytest
import torch
from support.processes import run
from support.trainers import make_trainer
from torch.utils.data import DataLoader, TensorDataset

import treadle


def loader(samples=4):
    return DataLoader(TensorDataset(torch.arange(float(samples)).reshape(-1, 1)), 1)


class Part(treadle.TaskModule):
    """A network that logs, and notes what it knows of the run."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.net = torch.nn.Linear(1, 1)
        self.known = []

    def forward(self, x):
        out = self.net(x)
        self.log(f"{self.name}_mean", x.mean(), on_epoch=True)
        self.known.append((self.current_epoch, self.global_step))
        return out


class Plain(treadle.TaskModule):
    """Has no parameters, and calls what needs a Trainer."""

    def forward(self, x):
        self.print("seen", end="")
        return self.all_gather(x).sum()


class Outer(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        self.child = Part("child")
        self.parts = torch.nn.ModuleList([torch.nn.Sequential(Part("deep"))])
        self.plain = Plain()

    def configure_model(self):
        if not hasattr(self, "late"):
            self.late = Part("late")

    def training_step(self, batch, batch_idx):
        self.seen = self.plain(batch[0]).item()
        return (self.child(batch[0]) + self.parts[0](batch[0]) + self.late(batch[0])).mean()

    def validation_step(self, batch, batch_idx):
        self.child(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fitted():
    task = Outer()
    trainer = make_trainer(max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(task, loader())
    return task, trainer


def test_a_part_knows_epoch_step_and_trainer(capsys):
    task, trainer = fitted()
    every = [task.child, task.parts[0][0], task.late]
    for part in every:
        assert part.known == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6), (1, 7)]
        assert part.trainer is trainer
        assert part.optimizers().optimizer is trainer.optimizers[0]
        assert part.device == torch.device("cpu")
    assert capsys.readouterr().out == "seen" * 8
    means = {name: float(value) for name, value in trainer.callback_metrics.items() if name.endswith("_epoch")}
    assert means == {"child_mean_epoch": 1.5, "deep_mean_epoch": 1.5, "late_mean_epoch": 1.5}
    trainer.validate(task, loader(2), verbose=False)
    assert float(trainer.callback_metrics["child_mean"]) == 0.5


def test_outside_of_a_run_it_says_so():
    task, _ = fitted()
    with pytest.warns(UserWarning, match="'child_mean'.* has no effect here"):
        task.child(torch.ones(1, 1))
    for copied in (copy.deepcopy(task), pickle.loads(pickle.dumps(task))):
        with pytest.raises(RuntimeError, match="Part is not attached to a Trainer"):
            _ = copied.child.trainer
    with pytest.raises(RuntimeError, match="Part is not attached to a Trainer"):
        _ = Part("alone").trainer


def ranks():
    task, trainer = fitted()
    return task.child.global_rank, task.seen, float(trainer.callback_metrics["deep_mean_epoch"])


def test_two_processes():
    assert run(ranks, 2) == [(0, 5.0, 1.5), (1, 5.0, 1.5)]
