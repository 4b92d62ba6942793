"""A task and data for the tests of `LightningCLI`, with arguments of each kind; written as for Lightning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from cli_samples import Color, Line, Points
from torch import nn
from torch.utils.data import DataLoader
from treadle.cli import LRSchedulerCallable, OptimizerCallable


@dataclass
class Options:
    width: int = 4
    bias: bool = True


class Encoder(nn.Module):
    def __init__(self, width: int = 3, activation: nn.Module | None = None):
        super().__init__()
        self.width, self.activation = width, activation


class DeepEncoder(Encoder):
    def __init__(self, depth: int = 2, **kwargs):
        super().__init__(**kwargs)
        self.depth = depth


class Model(Line):
    """Fits a plane.

    Args:
        lr: the learning rate.
        sizes: widths of layers.
    """

    def __init__(
        self,
        lr: float = 0.02,
        sizes: list[int] = [8],  # noqa: B006
        options: Options = Options(width=7),  # noqa: B008
        color: Color = Color.RED,
        batch_size: int = 1,
        path: Path | None = None,
        mode: Literal["min", "max"] = "min",
        extra: dict | None = None,
        encoder: Encoder | None = None,
        flag: bool = False,
        name: int | str = "x",
        activation: Callable = torch.relu,
    ):
        super().__init__(lr)
        self.save_hyperparameters(ignore=["encoder", "activation"])
        self.encoder, self.activation, self.seen = encoder, activation, []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss


class Linked(Model):
    """Gets the settings of two optimizers and a schedule."""

    def __init__(self, first: dict, second: dict, schedule: dict):
        super().__init__()
        self.linked = [first, second, schedule]


class Factories(Model):
    """Gets functions that make its optimizer and schedule."""

    def __init__(
        self,
        optimizer: OptimizerCallable = torch.optim.Adam,
        schedule: LRSchedulerCallable = lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.7),
    ):
        super().__init__()
        self.optimizer, self.schedule = optimizer, schedule

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}


class Data(Points):
    num_classes = 2

    def train_dataloader(self):
        return DataLoader(self.loader().dataset, self.batch_size, shuffle=True)


def build_model(lr: float = 0.1, batch_size: int = 2) -> Model:
    return Model(lr=lr, batch_size=batch_size)
