"""What tests share that mean a GPU, and run on the CPU as far as that can show anything."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle
from support.differences import whole
from support.trainers import make_trainer

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
FLAG = "gpu" if CUDA else "cpu"
VISIBLE = {"CUDA_VISIBLE_DEVICES": "0"} if CUDA else {}


def needs_gpu(test):
    """Leave a test out where there is no CUDA device."""
    return pytest.mark.gpu(pytest.mark.skipif(not CUDA, reason="needs a CUDA device")(test))


def trainer(**flags):
    return make_trainer(**{"accelerator": FLAG, "devices": 1, **flags})


def accelerator(**options):
    return treadle.Accelerator(cpu=not CUDA, **options)


def keep_busy():
    """Let the device compute for some tens of milliseconds, while the host goes on."""
    if CUDA:
        torch.cuda._sleep(50_000_000)


class Net(nn.Module):
    def __init__(self, width=16, blocks=3, drop=0.0):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(drop)) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.norm(x))


class Task(treadle.TaskModule):
    """Learns a sum; logs its loss, and keeps it on the device.

    Args:
        bad: the batch whose loss is NaN; None for none.
        slow: keep the device busy in each step.
        options: of the network.
    """

    def __init__(self, bad=None, slow=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.bad, self.slow = Net(**options), bad, slow
        self.losses = []

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch, batch_idx):
        if self.slow:
            keep_busy()
        loss = self.loss(batch)
        if batch_idx == self.bad:
            loss = loss * float("nan")
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        if self.slow:
            keep_busy()
        return {"twice": 2 * batch[0], "first": batch[0][0, 0]}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader(steps=8, batch_size=4, **options):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps * batch_size, 8, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size, **options)


def weights(module):
    """Copies in host memory, whole where they are shards."""
    return {name: whole(parameter).detach().cpu().clone() for name, parameter in module.named_parameters()}


def are_equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
