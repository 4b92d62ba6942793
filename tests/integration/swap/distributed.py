"""Data parallel training with a sampler of one's own.

python distributed.py --devices 2 --out results.json
"""

import argparse
import json
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Points(pl.LightningDataModule):
    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.batch_size = batch_size

    def _loader(self, count: int, shift: float, shuffle: bool):
        x = torch.sin(torch.arange(3.0 * count).view(count, 3) * 0.7 + shift)
        data = TensorDataset(x, x.sum(dim=1, keepdim=True) ** 2)
        sampler = DistributedSampler(data, self.trainer.world_size, self.trainer.global_rank, shuffle=shuffle, seed=3)
        return DataLoader(data, batch_size=self.batch_size, sampler=sampler)

    def train_dataloader(self):
        return self._loader(128, 0.0, shuffle=True)

    def val_dataloader(self):
        return self._loader(64, 0.3, shuffle=False)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
        self.validations = []

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return {"loss": loss, "seen": loss.detach()}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.validations.append(self.trainer.callback_metrics["val_loss"].item())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Gathered(Callback):
    """The mean of all processes' losses, batch by batch."""

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(pl_module.all_gather(outputs["seen"]).mean().item())


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="runs/distributed")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--out")
    args = parser.parse_args(argv)

    pl.seed_everything(5, workers=True)
    model, gathered = Model(), Gathered()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=DDPStrategy(find_unused_parameters=False),
        precision="64-true",
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
        callbacks=[gathered],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=args.root,
    )
    trainer.fit(model, datamodule=Points())
    results = {
        "losses": gathered.losses,
        "metrics": {
            "validations": model.validations,
            "train_loss": trainer.callback_metrics["train_loss"].item(),
            "weights": sum(p.abs().sum().item() for p in model.parameters()),
        },
        "facts": {"steps": trainer.global_step, "world": trainer.world_size},
    }
    if args.out and trainer.is_global_zero:
        Path(args.out).write_text(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
