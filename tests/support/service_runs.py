"""Runs that a service logs, of which all figures are known."""

import torch

import treadle
from support.models import SGDTask
from support.trainers import make_trainer


class Task(SGDTask):
    def __init__(self, width=2):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        self.log("mean", batch.mean())
        return self.layer(batch).sum()


def loader():
    return torch.utils.data.DataLoader(torch.arange(8.0).repeat(2, 1).T.contiguous(), batch_size=1)


def trainer(folder, logger, **options):
    flags = {"logger": logger, "log_every_n_steps": 1, "enable_checkpointing": True, "default_root_dir": folder}
    return make_trainer(**{**flags, **options})


class Tell(treadle.Callback):
    def on_train_end(self, trainer, pl_module):
        trainer.logbook.call_loggers("after_save_checkpoint", trainer.checkpoint_callback)
