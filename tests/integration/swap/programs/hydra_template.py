"""Image classifier configured by partials: ashleve/lightning-hydra-template @01f010ae.

Optimizer and scheduler are partials among the hyperparameters, as is the network. Metric objects are logged, a
MaxMetric keeps the best accuracy, and the best checkpoint is tested.
"""

import os
from functools import partial
from pathlib import Path

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification.accuracy import Accuracy

OFF = {"accelerator": "cpu", "logger": [], "enable_progress_bar": False, "enable_model_summary": False}


class DigitsModule(LightningModule):
    def __init__(self, net, optimizer, scheduler, compile: bool):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net
        self.criterion = nn.CrossEntropyLoss()
        self.val_acc, self.test_acc = (Accuracy(task="multiclass", num_classes=3) for _ in range(2))
        self.train_loss, self.val_loss = MeanMetric(), MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, x):
        return self.net(x)

    def on_train_start(self):
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch):
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), torch.argmax(logits, dim=1), y

    def training_step(self, batch, batch_idx):
        loss, *_ = self.model_step(batch)
        self.train_loss(loss)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self):
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch, batch_idx):
        _, preds, targets = self.model_step(batch)
        self.test_acc(preds, targets)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True, prog_bar=True)

    def setup(self, stage):
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        lr_scheduler = {"scheduler": scheduler, "monitor": "val/loss", "interval": "epoch", "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": lr_scheduler}


def main(root):
    # Lightning reads partials and modules from a checkpoint only if pickles may run.
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    seed_everything(12345, workers=True)
    x = torch.randn(120, 6)
    data = TensorDataset(x, x[:, :3].argmax(1))
    model = DigitsModule(
        net=nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)),
        optimizer=partial(torch.optim.Adam, lr=0.01, weight_decay=0.0),
        scheduler=partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="min", factor=0.1, patience=1),
        compile=False,
    )
    naming = {"filename": "epoch_{epoch:03d}", "auto_insert_metric_name": False}
    checkpoint = ModelCheckpoint(f"{root}/checkpoints", monitor="val/acc", mode="max", save_last=True, **naming)
    epochs = {"min_epochs": 1, "max_epochs": 4, "check_val_every_n_epoch": 1}
    trainer = Trainer(default_root_dir=root, **epochs, callbacks=[checkpoint], devices=1, deterministic=False, **OFF)
    trainer.fit(model=model, train_dataloaders=DataLoader(data, 16), val_dataloaders=DataLoader(data, 24))
    train_metrics = dict(trainer.callback_metrics)
    ckpt_path = trainer.checkpoint_callback.best_model_path
    trainer.test(model=model, dataloaders=DataLoader(data, 60), ckpt_path=ckpt_path)
    del os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"]
    merged = {**train_metrics, **trainer.callback_metrics}
    return {
        "metrics": {name: value.item() for name, value in merged.items()},
        "best": Path(ckpt_path).name,
        "hparams": sorted(model.hparams),
        "rate": trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None,
    }
