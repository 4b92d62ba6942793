"""One regressor, two kinds of training data at once, and an evaluation on several sets.

python evaluation.py --out results.json
"""

import argparse
import json
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError, MeanSquaredError


def surface(count: int, shift: float = 0.0, noise: float = 0.0) -> TensorDataset:
    """A function of two numbers on a spiral of points, by formula."""
    number = torch.arange(count, dtype=torch.float32)
    x = torch.stack([torch.sin(number * 0.7 + shift), torch.cos(number * 1.3 - shift)], dim=1)
    y = x[:, :1] * x[:, 1:] + 0.5 * x[:, :1] + shift + noise * torch.sin(number * 17).unsqueeze(1)
    return TensorDataset(x, y)


class Regressor(pl.LightningModule):
    val_names = ("clean", "shifted")

    def __init__(self, width: int = 16, lr: float = 0.05):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))
        self.val_mae = nn.ModuleDict({name: MeanAbsoluteError() for name in self.val_names})
        self.test_mse = nn.ModuleList([MeanSquaredError() for _ in range(3)])
        self.seen = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch["clean"]
        noisy_x, noisy_y = batch["noisy"]
        clean_loss, noisy_loss = F.mse_loss(self(x), y), F.l1_loss(self(noisy_x), noisy_y)
        loss = clean_loss + 0.3 * noisy_loss
        self.log_dict({"train/clean": clean_loss, "train/loss": loss}, on_step=False, on_epoch=True, batch_size=len(x))
        self.log("train/noisy", noisy_loss, on_step=False, on_epoch=True)
        self.log("train/worst", clean_loss, on_step=False, on_epoch=True, reduce_fx="max")
        return {"loss": loss, "sizes": (len(x), len(noisy_x))}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        name = self.val_names[dataloader_idx]
        pred = self(x)
        self.log("val_loss", F.mse_loss(pred, y))
        self.val_mae[name](pred, y)
        self.log(f"val/{name}/mae", self.val_mae[name], on_step=False, on_epoch=True, add_dataloader_idx=False)
        if dataloader_idx == 0:
            self.log("val/steps", F.mse_loss(pred, y), on_step=True, on_epoch=True, add_dataloader_idx=False)
        return pred

    def on_validation_epoch_end(self):
        names = [f"val/{name}/mae" for name in self.val_names]
        self.log("val/mean_mae", sum(self.trainer.callback_metrics.get(name, torch.tensor(9.0)) for name in names) / 2)

    def test_step(self, batch, batch_idx, dataloader_idx):
        x, y = batch
        self.test_mse[dataloader_idx](self(x), y)
        self.log("test_mse", self.test_mse[dataloader_idx])
        self.log(f"test/bias_{dataloader_idx}", (self(x) - y).mean(), add_dataloader_idx=False)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0]).squeeze(1)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)]


class Record(Callback):
    def __init__(self):
        self.losses, self.sizes, self.val_batches, self.validations = [], [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        self.sizes.append(list(outputs["sizes"]))

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.val_batches.append([trainer.current_epoch, dataloader_idx, batch_idx, len(outputs)])

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            kept = {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("val")}
            self.validations.append([trainer.global_step, kept])


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="runs/evaluation")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--sequential", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args(argv)

    pl.seed_everything(3)

    def training(shuffle):
        loaders = {
            "clean": DataLoader(surface(160), batch_size=16, shuffle=shuffle),
            "noisy": DataLoader(surface(90, noise=0.5), batch_size=16, shuffle=shuffle),
        }
        return CombinedLoader(loaders, mode="max_size_cycle")

    train = training(shuffle=not args.sequential)
    val = [DataLoader(surface(50), batch_size=16), DataLoader(surface(40, shift=0.2), batch_size=16)]
    test = [DataLoader(surface(size, shift=shift), batch_size=16) for size, shift in ((48, 0.0), (40, 0.1), (33, 0.2))]

    starts = []
    starting = LambdaCallback(on_train_epoch_start=lambda *_: starts.append(1))
    record = Record()
    checkpoint = ModelCheckpoint(
        dirpath=args.root, monitor="val_loss/dataloader_idx_0", filename="{epoch}-{step}", save_top_k=1
    )
    latest = ModelCheckpoint(dirpath=args.root, filename="latest-{epoch}", save_on_train_epoch_end=True)
    stopping = EarlyStopping("val/mean_mae", patience=3, check_on_train_epoch_end=False, verbose=False)
    common = {
        "accelerator": "cpu",
        "devices": args.devices,
        "strategy": "ddp" if args.devices > 1 else "auto",
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(
        max_epochs=4,
        val_check_interval=0.5,
        num_sanity_val_steps=-1,
        limit_val_batches=1.0,
        log_every_n_steps=2,
        logger=CSVLogger(args.root),
        callbacks=[record, stopping, checkpoint, latest, starting],
        **common,
    )
    model = Regressor()
    trainer.fit(model, train_dataloaders=train, val_dataloaders=val)
    last_path = latest.best_model_path
    batches = [trainer.num_training_batches, list(trainer.num_val_batches)]
    at_end = {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("train")}

    validated = trainer.validate(model, dataloaders=val, verbose=False)
    tested = trainer.test(model, dataloaders=test, ckpt_path="best", verbose=False)
    predicted = trainer.predict(model, dataloaders=val)
    only_one = trainer.predict(model, dataloaders=val[1], return_predictions=True)

    # once more from the last checkpoint, for one epoch in the order of the data
    again = Record()
    resumed = pl.Trainer(
        max_epochs=5,
        check_val_every_n_epoch=5,
        logger=False,
        enable_checkpointing=False,
        callbacks=[again],
        **common,
    )
    resumed.fit(Regressor(), training(shuffle=False), val, ckpt_path=last_path)

    results = {
        "losses": record.losses,
        "path_after_test_exists": Path(latest.best_model_path).exists(),
        "metrics": {
            "epoch": at_end,
            "validations": record.validations,
            "validate": validated,
            "test": tested,
            "predicted": [[[batch.mean().item(), len(batch)] for batch in loader] for loader in predicted],
            "only_one": [batch.mean().item() for batch in only_one],
            "best": checkpoint.best_model_score.item(),
            "waited": stopping.wait_count,
            "resumed": again.losses,
        },
        "facts": {
            "sizes": record.sizes,
            "val_batches": record.val_batches,
            "epochs": len(starts),
            "batches": batches,
            "checkpoint": Path(checkpoint.best_model_path).stem,
            "resumed": [resumed.current_epoch, resumed.global_step, len(again.losses)],
        },
    }
    if args.out and trainer.is_global_zero:
        Path(args.out).write_text(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
