"""Runs in folders of their own, and jobs that fight for one."""

import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.trainer.runs import index
from treadle.trainer.runs.folder import RunFolder

import treadle
from support.models import SGDTask


def record(path):
    return json.loads((Path(path) / "run.json").read_text())


def state(path):
    return index.read(Path(path)).state


def at_once(count, work):
    """What `work` returns in so many forks, which begin it at the same moment."""
    go, start = os.pipe()
    readers, children = [], []
    for _ in range(count):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.close(start)
                os.read(go, 1)  # until all ends of it are closed
                os.write(writer, json.dumps(work()).encode())
            finally:
                os._exit(0)
        os.close(writer)
        readers.append(reader)
        children.append(child)
    os.close(go)
    os.close(start)
    found = [os.read(reader, 4096) for reader in readers]
    for reader, child in zip(readers, children, strict=True):
        os.close(reader)
        os.waitpid(child, 0)
    return [json.loads(text) for text in found]


def refused(directory):
    try:
        RunFolder.create(directory, settings={"accelerator": "cpu"})
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


class Task(SGDTask):
    """Learns a constant. `at` is called before each step with the steps so far."""

    lr = 0.05

    def __init__(self, at=lambda step: None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1)
        self.at = at

    def training_step(self, batch, batch_idx):
        self.at(self.trainer.global_step)
        loss = (self.net(batch[0]) - 1).pow(2).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.net(batch[0]) - 1).pow(2).mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", (self.net(batch[0]) - 1).pow(2).mean())


def data():
    return DataLoader(TensorDataset(torch.linspace(-1, 1, 32).reshape(16, 2)), batch_size=2)


def settings(**more):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return {"accelerator": "cpu", "max_epochs": 2, "log_every_n_steps": 1, **quiet, **more}


def fit(folder, task=None, ckpt_path=None, **more):
    trainer = treadle.Trainer(**folder.flags(settings(**more)))
    trainer.fit(task or Task(), data(), data(), ckpt_path=ckpt_path)
    return trainer
