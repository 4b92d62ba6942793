"""Variational autoencoder: korintia/Variational-Autoencoder, train.py.

A Trainer subclass with ``CSVLogger(version=0)`` and ``EarlyStopping(mode="max")``, whose file of metrics is read
back.
"""

import csv
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


class VAETrainer(L.Trainer):
    def __init__(self, root, epochs):
        self.stopping = EarlyStopping(monitor="val_elbo", patience=2, mode="max", min_delta=0.02)
        best = ModelCheckpoint(monitor="val_elbo", mode="max", save_last=True)
        super().__init__(
            max_epochs=epochs,
            logger=CSVLogger(root, name="vae", version=0),
            log_every_n_steps=2,
            callbacks=[self.stopping, best],
            default_root_dir=root,
            **QUIET,
        )


class VAE(L.LightningModule):
    def __init__(self, latent=2, beta=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.encoder, self.decoder = nn.Linear(6, 2 * latent), nn.Linear(latent, 6)
        self.noise = torch.Generator().manual_seed(1)

    def elbo(self, x):
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        noise = torch.randn(mean.shape, generator=self.noise) if self.training else torch.zeros_like(mean)
        rebuilt = self.decoder(mean + noise * (log_var / 2).exp())
        kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()
        return -(rebuilt - x).pow(2).sum(1).mean() - self.hparams.beta * kl

    def training_step(self, batch, batch_idx):
        elbo = self.elbo(batch[0])
        self.log("train_elbo", elbo, on_step=False, on_epoch=True)
        return -elbo

    def validation_step(self, batch, batch_idx):
        self.log("val_elbo", self.elbo(batch[0]))

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=0.02)


def main(root):
    L.seed_everything(17)
    x = torch.randn(64, 2) @ torch.randn(2, 6)
    trainer = VAETrainer(root, 12)
    trainer.fit(VAE(), DataLoader(TensorDataset(x[:48]), 12), DataLoader(TensorDataset(x[48:]), 16))
    with open(Path(trainer.logger.log_dir) / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return {
        "curve": [float(row["val_elbo"]) for row in rows if row["val_elbo"]],
        "trained": [float(row["train_elbo"]) for row in rows if row["train_elbo"]],
        "stopped": trainer.stopping.stopped_epoch,
        "best": trainer.stopping.best_score.item(),
        "folder": Path(trainer.logger.log_dir).name,
        "epoch": trainer.current_epoch,
        "saved": trainer.checkpoint_callback.best_model_score.item(),
    }
