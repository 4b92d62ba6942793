"""Policy gradients on data made anew: rl4co 0.7.0, models/rl/common/base.py and utils/trainer.py.

A Trainer subclass passes on arguments; the module owns its loaders and replaces its dataset in
``on_train_epoch_end``, with ``reload_dataloaders_every_n_epochs=1``; ``val_dataloader`` returns a list;
``MultiStepLR`` by epoch.
"""

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

OFF = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def costs(seed, count=32):
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))


class RL4COTrainer(Trainer):
    def __init__(self, max_epochs=3, gradient_clip_val=1.0, reload_dataloaders_every_n_epochs=1, **kwargs):
        kwargs["reload_dataloaders_every_n_epochs"] = reload_dataloaders_every_n_epochs
        super().__init__(max_epochs=max_epochs, gradient_clip_val=gradient_clip_val, precision="32-true", **kwargs)

    def fit(self, model, train_dataloaders=None, val_dataloaders=None, datamodule=None, ckpt_path=None):
        if ckpt_path is None:
            self.fitted_with = type(model).__name__
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path)


class REINFORCE(LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["env", "policy", "dataset"])
        self.policy, self.seeds = torch.nn.Linear(5, 5), []

    def setup(self, stage="fit"):
        self.train_dataset, self.val_dataset = costs(0), [costs(100), costs(101, 16)]

    def shared_step(self, batch, batch_idx, phase, dataloader_idx=None):
        logp = self.policy(batch).log_softmax(-1)
        reward = -batch
        best = (logp.exp() * reward).sum(-1)
        loss = -(best - reward.mean(-1).detach()).mean()
        metrics = {f"{phase}/loss": loss, f"{phase}/reward": best.mean()}
        if phase == "train":
            self.log_dict(metrics, on_step=True, on_epoch=False, prog_bar=True, sync_dist=True, batch_size=len(batch))
        else:
            name = "" if dataloader_idx is None else f"/{dataloader_idx}"
            metrics = {key + name: value for key, value in metrics.items()}
            self.log_dict(metrics, on_epoch=True, on_step=False, sync_dist=True, add_dataloader_idx=False)
        return {"loss": loss, **metrics}

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, batch_idx, phase="train")

    def validation_step(self, batch, batch_idx, dataloader_idx=None):
        return self.shared_step(batch, batch_idx, phase="val", dataloader_idx=dataloader_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2], gamma=0.1)
        return [optimizer], {"scheduler": scheduler, "interval": "epoch", "monitor": "val/reward/0"}

    def train_dataloader(self):
        self.seeds.append(self.current_epoch)
        return DataLoader(self.train_dataset, 8, shuffle=False)

    def val_dataloader(self):
        return [DataLoader(data, 16) for data in self.val_dataset]

    def on_train_epoch_end(self):
        self.train_dataset = costs(self.current_epoch + 1)


def main(root):
    seed_everything(1234)
    model = REINFORCE()
    trainer = RL4COTrainer(default_root_dir=root, enable_checkpointing=False, **OFF)
    trainer.fit(model)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"metrics": metrics, "seeds": model.seeds, "fitted_with": trainer.fitted_with}
