"""A training that fails at a place of choice, and is saved."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from treadle.callbacks import Callback, EarlyStopping, ModelCheckpoint

import treadle
from support.trainers import make_trainer


class Samples(Dataset):
    """The features differ each time they are read."""

    def __len__(self):
        return 13

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index)) + 0.1 * torch.rand(4)
        return (x + 0.1 * random.random() + 0.1 * np.random.rand()).float(), torch.tensor([float(index)])


class Task(treadle.TaskModule):
    """Has everything that moves between two steps."""

    def __init__(self, schedule="epoch", norm=True):
        super().__init__()
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.net = nn.Sequential(nn.Linear(4, 6), middle, nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 1))
        self.schedule = schedule
        self.register_buffer("seen", torch.zeros(()))
        self.order = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen += len(x)
        self.order.append(y.flatten().tolist())
        loss = nn.functional.mse_loss(self.net(x), y / 10)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1] / 10))

    def on_train_epoch_start(self):
        torch.rand(1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.schedule}}


class Fails(Callback):
    """Raises once, at a place, when so many steps are done."""

    HOOKS = {
        "forward": "on_train_batch_start",
        "backward": "on_after_backward",
        "batch_end": "on_train_batch_end",
        "step_end": "on_step_end",
        "validation": "on_validation_batch_start",
        "epoch_end": "on_train_epoch_end",
        "epoch_start": "on_train_epoch_start",
    }

    def __init__(self, place, step, error=RuntimeError):
        self.place, self.step, self.error = place, step, error
        setattr(self, self.HOOKS[place], self._fail)

    def _fail(self, trainer, task, batch=None, index=0, *_):
        first = self.place == "forward" and index % 2 == 0  # the group's second has drawn, and moved the buffers
        if trainer.global_step == self.step and not trainer.sanity_checking and not first:
            raise self.error(f"planned: {self.place} {self.step}")


class OtherWeights(Callback):
    """Validates with other weights, as those do that average them."""

    def on_validation_start(self, trainer, task):
        self.kept = [p.detach().clone() for p in task.parameters()]
        for p in task.parameters():
            p.data.mul_(0.5)

    def on_validation_end(self, trainer, task):
        for p, kept in zip(task.parameters(), self.kept, strict=True):
            p.data.copy_(kept)


def saver(root, **more):
    return ModelCheckpoint(root / "c", every_n_epochs=0, save_on_exception=True, **more)


def made(root, *callbacks, **flags):
    defaults = {"max_epochs": 3, "enable_checkpointing": True, "accumulate_grad_batches": 2, "default_root_dir": root}
    return make_trainer(**{**defaults, **flags}, callbacks=[EarlyStopping("val", patience=9), *callbacks])


def loaders():
    validation = TensorDataset(torch.randn(5, 4, generator=torch.Generator().manual_seed(5)), torch.zeros(5, 1))
    return DataLoader(Samples(), batch_size=3, shuffle=True, drop_last=True), DataLoader(validation, batch_size=2)
