"""Scheduled loss coefficients: nequip 0.19.1, nequip/train/lightning.py and callbacks/loss_coeff_scheduler.py.

Callbacks that set the coefficients of the loss by epoch, dictionaries of loaders from the data module's lists, and
metrics named by the loader's number.
"""

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

OFF = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class LossCoefficientScheduler(Callback):
    def __init__(self, schedule):
        self.schedule = {int(k): v for k, v in schedule.items()}

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch in self.schedule:
            pl_module.coeffs.update(self.schedule[trainer.current_epoch])


class LossCoefficientMonitor(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step % 2 == 0:
            pl_module.log_dict({f"coeff/{name}": value for name, value in pl_module.coeffs.items()})


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(3, 2)
        self.coeffs = {"energy": 1.0, "forces": 0.0}

    def losses(self, batch):
        energy, forces = self.model(batch[0]).sub(batch[1]).pow(2).mean(0)
        return {"energy": energy, "forces": forces}

    def training_step(self, batch, batch_idx, dataloader_idx=0):
        losses = self.losses(batch)
        loss = sum(self.coeffs[name] * losses[name] for name in losses)
        self.log_dict({f"train/{name}": value for name, value in losses.items()})
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        losses = self.losses(batch)
        self.log_dict(
            {f"val{dataloader_idx}_epoch/{name}": value for name, value in losses.items()},
            on_step=False,
            on_epoch=True,
            add_dataloader_idx=False,
        )

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val0_epoch/energy", "interval": "epoch", "frequency": 1},
        }


class Data(LightningDataModule):
    def __init__(self):
        super().__init__()
        x = torch.randn(60, 3)
        self.data = TensorDataset(x, x[:, :2] * 2)

    def train_dataloader(self):
        return DataLoader(self.data, 12)

    def val_dataloader(self):
        return [DataLoader(self.data, 20), DataLoader(self.data, 30)]

    test_dataloader = val_dataloader


def main(root):
    seed_everything(2)
    callbacks = [LossCoefficientScheduler({1: {"energy": 0.5, "forces": 0.5}}), LossCoefficientMonitor()]
    trainer = Trainer(
        default_root_dir=root, max_epochs=3, callbacks=callbacks, enable_checkpointing=False, log_every_n_steps=1, **OFF
    )
    model, data = Module(), Data()
    trainer.fit(model, datamodule=data)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"metrics": metrics, "validated": trainer.validate(model, datamodule=data)}
