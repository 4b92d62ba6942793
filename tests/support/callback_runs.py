"""A tiny task, data and trainer for the tests of callbacks."""

import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import Callback, ModelCheckpoint, ModelSummary, ProgressBar
from treadle.loggers import Logger

import treadle
from support.trainers import make_trainer


class Tiny(treadle.TaskModule):
    """Logs what it is told to: ``values[i]`` in the i-th validation, and the training loss."""

    def __init__(self, values=(), pause=0.0):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(2, 1)
        self.values = list(values)
        self.pause = pause
        self.rounds = 0

    def _wait(self):
        if self.pause:  # a sleep of 0 s gives the CPU away, which costs 2 ms on a busy machine
            time.sleep(self.pause)

    def training_step(self, batch, batch_idx):
        self._wait()
        loss = self.net(batch[0]).pow(2).mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self._wait()
        if self.values and not self.trainer.sanity_checking:
            self.log("val_loss", self.values[min(self.rounds, len(self.values) - 1)], prog_bar=True)

    def on_validation_epoch_end(self):
        self.rounds += not self.trainer.sanity_checking

    def test_step(self, batch, batch_idx):
        self._wait()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader(samples=10, batch_size=2):
    generator = torch.Generator().manual_seed(4)
    return DataLoader(TensorDataset(torch.randn(samples, 2, generator=generator)), batch_size=batch_size)


def trainer(root, *callbacks, **flags):
    """Five batches an epoch, two epochs, no words."""
    defaults = {
        "max_epochs": 2,
        "enable_progress_bar": any(isinstance(c, ProgressBar) for c in callbacks),
        "enable_model_summary": any(isinstance(c, ModelSummary) for c in callbacks),
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "num_sanity_val_steps": 0,
        "default_root_dir": root,
    }
    return make_trainer(**{**defaults, **flags}, callbacks=list(callbacks))


def fit(root, *callbacks, values=(), validate=True, task=None, ckpt_path=None, samples=10, **flags):
    """Train a `Tiny`; returns the trainer."""
    made = trainer(root, *callbacks, **flags)
    made.fit(task or Tiny(values), loader(samples), loader(4) if validate else None, ckpt_path=ckpt_path)
    return made


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


class Rows(Logger):
    """Keeps what it is given."""

    name, version = "rows", 0

    def __init__(self):
        self.rows = []
        self.saved = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params, metrics=None):
        pass

    def after_save_checkpoint(self, checkpoint_callback):
        self.saved.append(checkpoint_callback.best_model_path)

    def of(self, name):
        return [(step, row[name]) for step, row in self.rows if name in row]


class Steps(Callback):
    """Notes the weights after each optimizer step."""

    def __init__(self):
        self.weights = {0: None}

    def on_step_end(self, trainer, pl_module):
        self.weights[trainer.global_step] = pl_module.net.weight.detach().clone()


class ByEpoch(Tiny):
    """What a validation logs depends on the epoch alone, so a resumed run sees what another one saw."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.values[self.trainer.current_epoch])


class Example(Tiny):
    """Has an example input, and draws a number in its forward."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.example_input_array = torch.ones(3, 2)

    def forward(self, x):
        torch.rand(2)
        return self.net(x)
