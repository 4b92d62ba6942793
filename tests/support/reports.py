"""A run with a report, and the report's sections."""

import html
import re

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.loggers import CSVLogger

import treadle


class Data(treadle.DataModule):
    def __init__(self, batch_size=2):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=self.hparams.batch_size)

    val_dataloader = train_dataloader


class Task(treadle.TaskModule):
    def __init__(self, lr=0.1, net=None, fails=False):
        super().__init__()
        self.save_hyperparameters()
        self.net = self.hparams.net or nn.Linear(2, 1)

    def loss(self, batch):
        return self.net(batch[0]).square().mean()

    def training_step(self, batch, batch_idx):
        if self.hparams.fails and self.trainer.global_step == 3:
            self.helper()
        return self.loss(batch)

    def helper(self):
        try:
            raise KeyError("key")
        except KeyError as error:
            raise ValueError("first line <b>\nsecond line " + "x" * 300) from error

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def trainer(root, **flags):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return treadle.Trainer(**{"logger": CSVLogger(root), "max_epochs": 2, **quiet, **flags})


def section(page, name):
    """The text of a section, and what is folded in it."""
    found = re.search(rf"<section><h2>{re.escape(html.escape(name))}</h2>(.*?)</section>", page, re.DOTALL)[1]
    return found.partition("<details>")[::2]


def page_of(one):
    with open(f"{one.log_dir}/report.html", encoding="utf-8") as file:
        return file.read()
