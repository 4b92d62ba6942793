"""Runs in folders of their own, and jobs that fight for one."""

import json
import multiprocessing
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
    context = multiprocessing.get_context("fork")
    results, (go, start) = context.SimpleQueue(), os.pipe()

    def begin():
        os.close(start)
        os.read(go, 1)  # until all ends of it are closed
        results.put(work())

    children = [context.Process(target=begin) for _ in range(count)]
    for child in children:
        child.start()
    os.close(start)
    for child in children:
        child.join()
    os.close(go)
    assert all(child.exitcode == 0 for child in children)
    return [results.get() for _ in children]


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
