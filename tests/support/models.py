"""Small tasks, for tests of something else."""

import torch
from torch import nn

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
