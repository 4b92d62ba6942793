"""Forecaster trained by steps and reloaded: gluonts 0.17.0, torch/model/estimator.py.

``trainer_kwargs`` are merged into defaults, with a ModelCheckpoint that monitors the training loss; the best path is
read with ``load_from_checkpoint``; endless training batches are bounded by ``limit_train_batches``; steps share one
method that asks ``self.trainer.state`` or ``self.training``.
"""

import itertools

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, IterableDataset


class Windows(IterableDataset):
    def __init__(self, series, endless):
        self.series, self.endless = series, endless

    def __iter__(self):
        windows = [(self.series[i : i + 6], self.series[i + 6]) for i in range(len(self.series) - 6)]
        return iter(itertools.cycle(windows) if self.endless else windows)


class ForecastModule(pl.LightningModule):
    def __init__(self, model_kwargs: dict, lr: float = 0.01, patience: int = 10):
        super().__init__()
        self.save_hyperparameters()
        self.model = torch.nn.Linear(**model_kwargs)
        self.example_input_array = torch.zeros(1, 6)
        self.states = set()

    @property
    def current_stage(self):
        names = {"train": "train", "validate": "val", "test": "test", "predict": "predict", "sanity_check": "val"}
        stage = self.trainer.state.stage
        return names[getattr(stage, "value", stage)]

    def forward(self, x):
        return self.model(x)

    def step(self, batch):
        past, future = batch
        loss = (self(past).squeeze(-1) - future).pow(2).mean()
        self.states.add(self.current_stage)
        return loss

    def training_step(self, batch, batch_idx: int):
        train_loss = self.step(batch)
        self.log("train_loss", train_loss, on_epoch=True, on_step=False, prog_bar=True)
        return train_loss

    def validation_step(self, batch, batch_idx: int):
        val_loss = self.step(batch)
        self.log("val_loss", val_loss, on_epoch=True, on_step=False, prog_bar=True)
        return val_loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.model.parameters(), lr=self.hparams.lr, weight_decay=1e-8)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", factor=0.5, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def main(root):
    pl.seed_everything(21)
    series = torch.sin(torch.arange(60) / 3)
    module = ForecastModule({"in_features": 6, "out_features": 1}, lr=0.05)
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=root, monitor="val_loss", mode="min", verbose=False)
    defaults = {"max_epochs": 100, "gradient_clip_val": 10.0, "accelerator": "cpu", "enable_progress_bar": False}
    options = defaults | {"max_epochs": 4, "limit_train_batches": 9, "callbacks": [checkpoint], "logger": False}
    trainer = pl.Trainer(**options, enable_model_summary=False, default_root_dir=root)
    loaders = DataLoader(Windows(series, True), 8), DataLoader(Windows(series, False), 16)
    trainer.fit(model=module, train_dataloaders=loaders[0], val_dataloaders=loaders[1], ckpt_path=None)
    best = ForecastModule.load_from_checkpoint(checkpoint.best_model_path)
    return {
        "losses": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "step": trainer.global_step,
        "best": checkpoint.best_model_score.item(),
        "weight": best.model.weight.tolist(),
        "lr": best.hparams.lr,
        "stages": sorted(module.states),
    }
