"""Small tasks and their data, for tests of something else."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle


class SGDTask(treadle.TaskModule):
    """Is trained by SGD; whatever else it has is the subclass's."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Line(SGDTask):
    """A linear layer of `features` numbers, whose square shall be small."""

    features = 2

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(self.features, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()


def loader(samples=4, batch_size=2, features=2, **options):
    """Batches of ones; no two samples differ, so that neither their order nor their number shows in a loss."""
    return DataLoader(TensorDataset(torch.ones(samples, features)), batch_size, **options)
