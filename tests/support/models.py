"""Small tasks and their data, for tests of something else."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from treadle.callbacks import Callback

import treadle


class SGDTask(treadle.TaskModule):
    """Is trained by SGD; whatever else it has is the subclass's."""

    lr = 0.1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Line(SGDTask):
    """A linear layer of `features` numbers, whose square shall be small."""

    features = 2

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(self.features, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()


def with_step(step):
    """A `Line` whose training step is `step`, a function of the task."""
    return type("Odd", (Line,), {"training_step": lambda self, batch, batch_idx: step(self)})()


class LoggedLine(Line):
    """A `Line` that logs its loss."""

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss


class Scored(LoggedLine):
    """A `LoggedLine` that logs its loss in validation and test too."""

    def loss(self, batch):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))


class Normed(nn.Module):
    """Two linear layers around a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear1, self.batchnorm, self.linear2 = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.batchnorm(self.linear1(x)))


class ScalarNet(nn.Module):
    """A linear layer from three numbers to one, in float64. The loss is its mean squared output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(3, 1).double()
        self.context = "the user's own"

    def forward(self, x):
        return self.layer(x).squeeze(-1)

    def training_step(self, batch):
        return (self(batch[0]) ** 2).mean()


class Count:
    """A number as an object with a state."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["value"]


class Numbers(IterableDataset):
    """A stream of the numbers below `length`, which it knows."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(range(self.length))


class Stream(IterableDataset):
    """A stream of samples, whose length nobody knows."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class SaveEach(Callback):
    """Saves after each step, under its number, what is not there yet."""

    def __init__(self, folder):
        self.folder = folder

    def on_step_end(self, trainer, pl_module):
        path = self.folder / str(trainer.global_step)
        if not path.exists():
            trainer.save_checkpoint(path)


class SaveIn(Callback):
    """Saves in one hook, the first time it is called after `step` optimizer steps, and notes the phase of the run."""

    def __init__(self, hook, step, path):
        self.step, self.path, self.phase = step, path, None
        setattr(self, hook, self.save)

    def save(self, trainer, *_):
        if trainer.progress.step == self.step and not trainer.sanity_checking and self.phase is None:
            self.phase = trainer.progress.phase
            trainer.save_checkpoint(self.path)


def loader(samples=4, batch_size=2, features=2, **options):
    """Batches of ones; no two samples differ, so that neither their order nor their number shows in a loss."""
    return DataLoader(TensorDataset(torch.ones(samples, features)), batch_size, **options)


def take_step(accelerator, model, optimizer, x):
    """A micro-batch of a loop of one's own, whose loss is the mean of the squared outputs."""
    with accelerator.accumulate(model):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def gathered(tensor):
    """The tensor without its graph; all of it where it is sharded."""
    return getattr(tensor, "full_tensor", lambda: tensor)().detach()


def optimize(task, loss):
    """What a training step does with its loss, under manual optimization too."""
    if task.automatic_optimization:
        return loss
    optimizer = task.optimizers()
    optimizer.zero_grad()
    task.manual_backward(loss)
    optimizer.step()
    return None
