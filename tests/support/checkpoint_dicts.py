"""A run whose checkpoints are dicts of Lightning's, and what is compared of them."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import ModelCheckpoint

import treadle
from support.trainers import make_trainer
from treadle.plugins import TorchCheckpointIO


class Task(treadle.TaskModule):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Recording(TorchCheckpointIO):
    def __init__(self):
        self.calls = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.calls.append(("save", os.path.basename(path)))
        super().save_checkpoint(checkpoint, path)

    def load_checkpoint(self, path, *args, **options):
        self.calls.append(("load", os.path.basename(path)))
        return super().load_checkpoint(path, *args, **options)

    def remove_checkpoint(self, path):
        self.calls.append(("remove", os.path.basename(path)))
        super().remove_checkpoint(path)


def loader():
    return DataLoader(TensorDataset(torch.arange(128.0).view(32, 4) / 128), 4, shuffle=True)


def fitted(folder, epochs, plugin=None, ckpt_path=None, **flags):
    torch.manual_seed(1)
    task, keeps = Task(), ModelCheckpoint(folder, monitor="loss", save_last=True)
    flags = {"enable_checkpointing": True, **flags}
    trainer = make_trainer(max_epochs=epochs, callbacks=keeps, plugins=plugin, **flags)
    trainer.fit(task, loader(), ckpt_path=ckpt_path)
    return task, trainer


def are_equal(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
