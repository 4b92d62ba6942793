"""A system made of ready parts: asteroid 0.7.0, asteroid/engine/system.py.

Model, optimizer, loss and loaders are arguments; ``lr_scheduler_step`` is overridden; ``hp_metric`` goes to the
logger by hand; ``on_save_checkpoint`` adds to the checkpoint and returns it.
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


class System(pl.LightningModule):
    default_monitor: str = "val_loss"

    def __init__(self, model, optimizer, loss_func, train_loader, val_loader=None, scheduler=None, config=None):
        super().__init__()
        self.model, self.optimizer, self.loss_func = model, optimizer, loss_func
        self.train_loader, self.val_loader, self.scheduler = train_loader, val_loader, scheduler
        self.config = {} if config is None else config
        self.save_hyperparameters(self.config)

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def common_step(self, batch, batch_nb):
        inputs, targets = batch
        return self.loss_func(self(inputs), targets)

    def training_step(self, batch, batch_nb):
        loss = self.common_step(batch, batch_nb)
        self.log("loss", loss, logger=True)
        return loss

    def validation_step(self, batch, batch_nb):
        self.log("val_loss", self.common_step(batch, batch_nb), on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self):
        hp_metric = self.trainer.callback_metrics.get("val_loss", None)
        if hp_metric is not None:
            self.trainer.logger.log_metrics({"hp_metric": hp_metric}, step=self.trainer.global_step)

    def configure_optimizers(self):
        epoch_schedulers = []
        for sched in self.scheduler:
            if not isinstance(sched, dict):
                sched = {"scheduler": sched, "monitor": self.default_monitor}
            elif sched["interval"] == "batch":
                sched = {"monitor": self.default_monitor, "frequency": 1, **sched, "interval": "step"}
            epoch_schedulers.append(sched)
        return [self.optimizer], epoch_schedulers

    def lr_scheduler_step(self, scheduler, metric):
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def train_dataloader(self):
        return self.train_loader

    def val_dataloader(self):
        return self.val_loader

    def on_save_checkpoint(self, checkpoint):
        checkpoint["training_config"] = self.config
        return checkpoint


def main(root):
    pl.seed_everything(11)
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, x.cumsum(1)), 16)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    schedulers = [
        ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
        {"scheduler": StepLR(optimizer, 10), "interval": "batch"},
    ]
    system = System(model, optimizer, nn.L1Loss(), loader, loader, schedulers, {"lr": 0.3, "name": "waves"})
    checkpoint = ModelCheckpoint(f"{root}/checkpoints/", monitor="val_loss", mode="min", save_top_k=5, verbose=False)
    callbacks = [checkpoint, EarlyStopping("val_loss", mode="min", patience=30)]
    flags = {"limit_train_batches": 1.0, "gradient_clip_val": 5.0, "logger": CSVLogger(root), **QUIET}
    trainer = pl.Trainer(max_epochs=8, callbacks=callbacks, default_root_dir=root, **flags)
    trainer.fit(system)
    best_k = {k.split("/")[-1]: v.item() for k, v in checkpoint.best_k_models.items()}
    return {
        "best_k": best_k,
        "rate": optimizer.param_groups[0]["lr"],
        "loss": trainer.callback_metrics["loss"].item(),
        "hparams": dict(system.hparams),
    }
