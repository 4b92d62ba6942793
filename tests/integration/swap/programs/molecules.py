"""Message passing model: chemprop 2.3.1, chemprop/models/model.py.

The schedule is sized by ``trainer.max_epochs`` and ``trainer.estimated_stepping_batches``; metrics live in a
ModuleList; training and validation share one step; predictions come from ``predict_step(batch, batch_idx,
dataloader_idx=0)``.
"""

from typing import NamedTuple

import torch
from lightning import pytorch as pl
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader
from torchmetrics import MeanAbsoluteError, MeanSquaredError

OFF = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class TrainingBatch(NamedTuple):
    V: torch.Tensor
    Y: torch.Tensor
    w: torch.Tensor
    missing: None


def collate(rows):
    V, Y = (torch.stack(part) for part in zip(*rows, strict=True))
    return TrainingBatch(V, Y, torch.ones(len(V), 1), None)


class MPNN(pl.LightningModule):
    def __init__(self, message_passing, predictor, warmup_epochs=2, init_lr=1e-3, max_lr=1e-2, final_lr=1e-4):
        super().__init__()
        self.save_hyperparameters(ignore=["message_passing", "predictor"])
        self.message_passing, self.predictor, self.bn = message_passing, predictor, nn.BatchNorm1d(6)
        self.metrics = nn.ModuleList([MeanSquaredError(), MeanAbsoluteError()])

    def forward(self, V):
        return self.predictor(self.bn(self.message_passing(V)))

    def training_step(self, batch: TrainingBatch, batch_idx):
        V, targets, weights, _ = batch
        loss = (weights * (self(V) - targets) ** 2).mean()
        self.log("train_loss", loss, batch_size=len(V), prog_bar=True, on_epoch=True)
        return loss

    def on_validation_model_eval(self):
        self.eval()
        self.message_passing.apply(lambda module: None)

    def validation_step(self, batch, batch_idx=0):
        self._evaluate_batch(batch, "val")
        V, targets, _, _ = batch
        self.metrics[0](self(V), targets)
        self.log("val_loss", self.metrics[0], batch_size=len(V), prog_bar=True)

    def test_step(self, batch, batch_idx=0):
        self._evaluate_batch(batch, "test")

    def _evaluate_batch(self, batch, label):
        V, targets, _, _ = batch
        mae = self.metrics[1]
        mae.update(self(V), targets)
        self.log(f"{label}/mae", mae, batch_size=len(V))

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch.V)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), self.hparams.init_lr)
        if self.trainer.train_dataloader is None:
            _ = self.trainer.estimated_stepping_batches  # loads the dataloader
        steps_per_epoch = self.trainer.num_training_batches
        warmup = self.hparams.warmup_epochs * steps_per_epoch
        total = self.trainer.max_epochs * steps_per_epoch
        rise = self.hparams.max_lr / self.hparams.init_lr

        def lr_lambda(step):
            if step < warmup:
                return 1 + (rise - 1) * step / warmup
            return rise * (self.hparams.final_lr / self.hparams.max_lr) ** ((step - warmup) / (total - warmup))

        schedule = lr_scheduler.LambdaLR(opt, lr_lambda)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(root):
    pl.seed_everything(0)
    rows = [(v, v.sum(0, keepdim=True)) for v in torch.randn(60, 5)]

    def make(part):
        return DataLoader(part, 16, collate_fn=collate)

    model = MPNN(nn.Sequential(nn.Linear(5, 6), nn.ReLU()), nn.Linear(6, 1))
    best = pl.callbacks.ModelCheckpoint(root, "best-{epoch}-{val_loss:.2f}", "val_loss", mode="min")
    trainer = pl.Trainer(default_root_dir=root, max_epochs=5, enable_checkpointing=True, callbacks=[best], **OFF)
    trainer.fit(model, make(rows[:40]), make(rows[40:50]))
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    results = trainer.test(model, make(rows[50:]))
    predictions = torch.cat(trainer.predict(model, make(rows[50:])))
    found = {"metrics": metrics, "rate": rate, "hparams": dict(model.hparams)}
    return found | {"tested": results, "predictions": predictions.flatten().tolist()}
