"""Neural potential: torchmd-net 2.4.10, torchmdnet/module.py.

``optimizer_step(*args, **kwargs)`` warms the rate up and clears the gradients; ``validation_step(batch, batch_idx,
*args)`` tells its loaders apart; losses are kept in dicts and logged at the epochs' ends; the step differentiates.
"""

from collections import defaultdict

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn.functional import l1_loss, mse_loss
from torch.utils.data import DataLoader, TensorDataset

OFF = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class LNNP(LightningModule):
    def __init__(self, hparams):
        super().__init__()
        self.save_hyperparameters(hparams)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.losses = defaultdict(list)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", factor=0.5, patience=1, min_lr=1e-6)
        lr_scheduler = {"scheduler": scheduler, "monitor": "val_loss", "interval": "epoch", "frequency": 1}
        return [optimizer], [lr_scheduler]

    def training_step(self, batch, batch_idx):
        return self.step(batch, mse_loss, "train")

    def validation_step(self, batch, batch_idx, *args):
        is_val = len(args) == 0 or (len(args) > 0 and args[0] == 0)
        return self.step(batch, mse_loss if is_val else l1_loss, "val" if is_val else "test")

    def step(self, batch, loss_fn, stage):
        pos, neg_dy = batch
        with torch.set_grad_enabled(True):
            pos = pos.clone().requires_grad_(True)
            y = self.model(pos)
            force = -torch.autograd.grad(y.sum(), pos, create_graph=stage == "train")[0]
            loss = loss_fn(force, neg_dy)
        self.losses[stage].append(loss.detach())
        return loss

    def optimizer_step(self, *args, **kwargs):
        optimizer = kwargs["optimizer"] if "optimizer" in kwargs else args[2]
        if self.trainer.global_step < self.hparams.lr_warmup_steps:
            lr_scale = min(1.0, float(self.trainer.global_step + 1) / float(self.hparams.lr_warmup_steps))
            for pg in optimizer.param_groups:
                pg["lr"] = lr_scale * self.hparams.lr
        super().optimizer_step(*args, **kwargs)
        optimizer.zero_grad()

    def on_train_epoch_end(self):
        self.log_dict({"train_loss": torch.stack(self.losses["train"]).mean()}, sync_dist=True)
        self.losses["train"] = []

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            result = {"epoch": float(self.current_epoch), "lr": self.trainer.optimizers[0].param_groups[0]["lr"]}
            result |= {f"{stage}_loss": torch.stack(self.losses[stage]).mean() for stage in ("val", "test")}
            self.log_dict(result, sync_dist=True)
        self.losses["val"], self.losses["test"] = [], []


def main(root):
    seed_everything(1)
    x = torch.randn(60, 3)
    data = TensorDataset(x, -2 * x)
    model = LNNP({"lr": 0.02, "lr_warmup_steps": 6})
    flags = {"inference_mode": False, "gradient_clip_val": 5.0, "enable_checkpointing": False, **OFF}
    trainer = Trainer(default_root_dir=root, max_epochs=5, **flags)
    trainer.fit(model, DataLoader(data, 20), [DataLoader(data, 30), DataLoader(data, 60)])
    return {name: value.item() for name, value in trainer.callback_metrics.items()} | {"lr": model.hparams.lr}
