"""Autoencoder with image logs: CompVis/latent-diffusion @1dbf39c1, main.py and ldm/models/autoencoder.py.

A DataModule whose ``*_dataloader`` methods are assigned on the instance, a learning rate set on the module from
outside, a callback that logs samples in evaluation mode every few batches, and weights averaged in the module's own
``on_train_batch_end``.
"""

from contextlib import contextmanager

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class DataModuleFromConfig(pl.LightningDataModule):
    def __init__(self, batch_size, train=None, validation=None):
        super().__init__()
        self.batch_size = batch_size
        self.dataset_configs = {}
        if train is not None:
            self.dataset_configs["train"] = train
            self.train_dataloader = self._train_dataloader
        if validation is not None:
            self.dataset_configs["validation"] = validation
            self.val_dataloader = self._val_dataloader

    def setup(self, stage=None):
        self.datasets = {key: TensorDataset(data) for key, data in self.dataset_configs.items()}

    def _train_dataloader(self):
        return DataLoader(self.datasets["train"], self.batch_size)

    def _val_dataloader(self):
        return DataLoader(self.datasets["validation"], self.batch_size)


class ImageLogger(Callback):
    def __init__(self, batch_frequency):
        super().__init__()
        self.batch_freq, self.logged = batch_frequency, []

    @rank_zero_only
    def log_local(self, split, images, global_step, current_epoch, batch_idx):
        self.logged.append([split, global_step, current_epoch, batch_idx, images["reconstruction"].mean().item()])

    def log_img(self, pl_module, batch, batch_idx, split="train"):
        if batch_idx % self.batch_freq == 0 and hasattr(pl_module, "log_images"):
            is_train = pl_module.training
            if is_train:
                pl_module.eval()
            with torch.no_grad():
                images = pl_module.log_images(batch, split=split)
            self.log_local(split, images, pl_module.global_step, pl_module.current_epoch, batch_idx)
            if is_train:
                pl_module.train()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if pl_module.global_step > 0:
            self.log_img(pl_module, batch, batch_idx, split="train")

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if pl_module.global_step > 0:
            self.log_img(pl_module, batch, batch_idx, split="val")


class AutoencoderKL(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 4), nn.Identity(), nn.Linear(4, 8))
        self.register_buffer("ema", torch.zeros(8))

    @contextmanager
    def ema_scope(self):
        bias = self.model[2].bias.detach().clone()
        self.model[2].bias.data.copy_(self.ema)
        try:
            yield None
        finally:
            self.model[2].bias.data.copy_(bias)

    def shared_step(self, batch):
        loss = ((self.model(batch[0]) - batch[0]) ** 2).mean()
        return loss, {f"{'train' if self.training else 'val'}/loss_simple": loss}

    def training_step(self, batch, batch_idx):
        loss, loss_dict = self.shared_step(batch)
        self.log_dict(loss_dict, prog_bar=True, logger=True, on_step=True, on_epoch=True)
        self.log("global_step", float(self.global_step), prog_bar=True, logger=True, on_step=True, on_epoch=False)
        self.log("lr_abs", self.optimizers().param_groups[0]["lr"], prog_bar=True, on_step=True, on_epoch=False)
        return loss

    @torch.no_grad()
    def validation_step(self, batch, batch_idx):
        _, plain = self.shared_step(batch)
        with self.ema_scope():
            _, averaged = self.shared_step(batch)
            averaged = {key + "_ema": averaged[key] for key in averaged}
        self.log_dict(plain, prog_bar=False, logger=True, on_step=False, on_epoch=True)
        self.log_dict(averaged, prog_bar=False, logger=True, on_step=False, on_epoch=True)

    def on_train_batch_end(self, *args, **kwargs):
        self.ema.lerp_(self.model[2].bias.detach(), 0.1)

    def log_images(self, batch, split):
        return {"inputs": batch[0], "reconstruction": self.model(batch[0])}

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        warmup = torch.optim.lr_scheduler.LambdaLR(opt, lr_lambda=lambda n: min(1.0, (n + 1) / 10))
        return [opt], [{"scheduler": warmup, "interval": "step", "frequency": 1}]


def main(root):
    pl.seed_everything(23)
    data = DataModuleFromConfig(8, train=torch.randn(64, 8), validation=torch.randn(16, 8))
    data.prepare_data()
    data.setup()
    model = AutoencoderKL()
    model.learning_rate = 2 * 8 * 1e-3
    images = ImageLogger(batch_frequency=4)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=3,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=CSVLogger(root, name="testtube"),
        log_every_n_steps=1,
        callbacks=[images, LearningRateMonitor("step")],
    )
    trainer.logdir = root
    trainer.fit(model, data)
    return {
        "images": images.logged,
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "ema": model.ema.tolist(),
        "datasets": [[key, len(data.datasets[key])] for key in data.datasets],
    }
