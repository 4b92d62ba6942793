"""Classify handwritten digits with a small convolutional network.

python classifier.py --out results.json
"""

import argparse
import csv
import json
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.types import STEP_OUTPUT, OptimizerLRScheduler
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import Accuracy, F1Score, MetricCollection


class DigitClassifier(pl.LightningModule):
    def __init__(self, channels: int = 8, num_classes: int = 10, lr: float = 0.1, weight_decay: float = 1e-4):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(channels * 16, num_classes),
        )
        self.example_input_array = torch.zeros(1, 1, 8, 8)

        self.train_acc = Accuracy(task="multiclass", num_classes=num_classes)
        self.val_acc = Accuracy(task="multiclass", num_classes=num_classes)
        accuracy = Accuracy(task="multiclass", num_classes=num_classes)
        f1 = F1Score(task="multiclass", num_classes=num_classes, average="macro")
        self.test_metrics = MetricCollection({"acc": accuracy, "f1": f1}, prefix="test_")
        self.validation_step_outputs = []

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def _shared_step(self, batch):
        x, y = batch
        logits = self(x)
        return F.cross_entropy(logits, y), logits.argmax(dim=1), y

    def on_train_start(self):
        self.logger.log_hyperparams(self.hparams)
        self.log("hp/channels", float(self.hparams.channels), on_epoch=True, on_step=False)

    def training_step(self, batch, batch_idx: int) -> STEP_OUTPUT:
        loss, preds, y = self._shared_step(batch)
        self.train_acc(preds, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return {"loss": loss, "preds": preds}

    def on_before_optimizer_step(self, optimizer):
        norms = grad_norm(self.model, norm_type=2)
        self.log("grad_norm", norms["grad_2.0_norm_total"])

    def on_train_epoch_end(self):
        self.log("epoch_lr", self.trainer.optimizers[0].param_groups[0]["lr"])

    def validation_step(self, batch, batch_idx: int) -> STEP_OUTPUT:
        loss, preds, y = self._shared_step(batch)
        self.val_acc.update(preds, y)
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_acc", self.val_acc, on_epoch=True, prog_bar=True)
        self.validation_step_outputs.append((preds == y).float())
        return loss

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.log_dict({"val_hits": torch.cat(self.validation_step_outputs).sum()}, sync_dist=True, reduce_fx="sum")
        self.validation_step_outputs.clear()

    def test_step(self, batch, batch_idx: int) -> None:
        loss, preds, y = self._shared_step(batch)
        self.test_metrics.update(preds, y)
        self.log("test_loss", loss, sync_dist=True)
        self.log_dict(self.test_metrics, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.SGD(self.parameters(), self.hparams.lr, 0.9, weight_decay=self.hparams.weight_decay)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", factor=0.3, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss", "interval": "epoch", "name": "plateau"},
        }


class History(Callback):
    """Keeps the curves for plotting later."""

    def __init__(self):
        self.losses, self.steps = [], []

    def on_train_start(self, trainer, pl_module):
        assert trainer.num_training_batches * trainer.max_epochs == trainer.estimated_stepping_batches
        assert (trainer.current_epoch, trainer.global_step) == (0, 0)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        self.steps.append(trainer.global_step)


def read_metrics(folder):
    """The curves in metrics.csv: steps and values of each column."""
    columns = {}
    with open(Path(folder) / "metrics.csv") as file:
        for row in csv.DictReader(file):
            for name in row.keys() - {"step", "epoch"}:
                if row[name] != "":
                    columns.setdefault(name, []).append([int(row["step"]), float(row[name])])
    return columns


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="runs/classifier")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--sequential", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args(argv)

    pl.seed_everything(42, workers=True)
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y))
    train, val, test = random_split(data, [1000, 397, 400], generator=torch.Generator().manual_seed(0))
    train_loader = DataLoader(train, batch_size=64, shuffle=not args.sequential)
    val_loader = DataLoader(val, batch_size=128)
    test_loader = DataLoader(test, batch_size=128)

    model = DigitClassifier()
    history = History()
    checkpoint = ModelCheckpoint(
        dirpath=Path(args.root) / "checkpoints",
        filename="digits-{epoch:02d}-{val_acc:.3f}",
        monitor="val_acc",
        mode="max",
        save_top_k=2,
        save_last=True,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        max_epochs=12,
        logger=CSVLogger(args.root, name="digits", version=0),
        callbacks=[
            checkpoint,
            EarlyStopping(monitor="val_loss", mode="min", patience=2, min_delta=0.005),
            LearningRateMonitor(logging_interval="epoch"),
            callbacks.ModelSummary(max_depth=2),
            callbacks.TQDMProgressBar(refresh_rate=20),
            history,
        ],
        log_every_n_steps=4,
        deterministic=True,
        default_root_dir=args.root,
    )
    trainer.fit(model, train_loader, val_loader)
    stopped_at = trainer.current_epoch, trainer.global_step
    fitted = {name: value.item() for name, value in trainer.callback_metrics.items()}

    (tested,) = trainer.test(model, dataloaders=test_loader, ckpt_path="best")
    (again,) = trainer.validate(model, dataloaders=val_loader, ckpt_path=checkpoint.best_model_path, verbose=False)

    best = DigitClassifier.load_from_checkpoint(checkpoint.best_model_path)

    results = {
        "losses": history.losses,
        "metrics": {
            "fitted": fitted,
            "test": tested,
            "validate": again,
            "best_model_score": checkpoint.best_model_score.item(),
            "kept": sorted(value.item() for value in checkpoint.best_k_models.values()),
        },
        "facts": {
            "stopped_at": stopped_at,
            "best": Path(checkpoint.best_model_path).stem,
            "hparams": dict(best.hparams),
            "global_steps": history.steps,
        },
    }
    if trainer.is_global_zero:
        results["curves"] = read_metrics(trainer.logger.log_dir)
        if args.out:
            Path(args.out).write_text(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
