"""Configurations that are planned, and run."""

from treadle.__main__ import main

TASK = """
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
import treadle


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.second(self.first(x).relu())


class OwnBatches(BatchSampler):
    def __iter__(self):
        yield from list(super().__iter__())[:10]

    def __len__(self):
        return 10


class Task(treadle.TaskModule):
    def __init__(self, width: int = 8, manual: bool = False, form: str = "plain"):
        super().__init__()
        self.form = form
        self.automatic_optimization = not manual
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        loss = self.head(self.blocks(batch[0])).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self):
        data = TensorDataset(torch.ones(100, self.head.in_features))
        if self.form == "dropped":
            return DataLoader(data, batch_size=6, drop_last=True)
        if self.form == "own batches":
            return DataLoader(data, batch_sampler=OwnBatches(range(50), 4, False))
        if self.form == "sampled":
            return DataLoader(data, batch_size=4, sampler=WeightedRandomSampler([1.0] * 100, 42))
        if self.form == "list":
            return [(torch.ones(4, self.head.in_features),)] * 9
        return DataLoader(data, batch_size=4)


class Pair(Task):
    def training_step(self, batch):
        return super().training_step(batch["long"], 0) + super().training_step(batch["short"], 0)

    def train_dataloader(self):
        data = TensorDataset(torch.ones(100, self.head.in_features))
        return {"long": DataLoader(data, batch_size=4), "short": DataLoader(data, batch_size=20)}


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.ones(100, 1, 8)


class Late(treadle.TaskModule):
    def __init__(self, schedule: str = "plateau"):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.schedule = schedule

    def setup(self, stage):
        self.first = nn.Linear(8, 4 * self.trainer.world_size)

    def configure_model(self):
        self.second = nn.Linear(self.first.out_features, self.trainer.max_epochs)

    def training_step(self, batch, batch_idx):
        self.log("rate", self.optimizers().param_groups[0]["lr"], on_epoch=True)
        return {"loss": self.second(self.first(batch[0])).mean() * self.rates[1], "weight": len(batch[0])}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.schedule == "none":
            return optimizer
        plateau, step = torch.optim.lr_scheduler.ReduceLROnPlateau, torch.optim.lr_scheduler.StepLR
        scheduler = plateau(optimizer) if self.schedule == "plateau" else step(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}

    def train_dataloader(self):
        if self.schedule == "stream":
            return DataLoader(Stream(), batch_size=4)
        return DataLoader(TensorDataset(torch.ones(100, 8)), batch_size=4)


class Broken(Task):
    def training_step(self, batch, batch_idx):
        return self.missing(batch)
"""


CONFIG = """
trainer: {max_epochs: 2, strategy: fsdp, devices: 2, accumulate_grad_batches: 2, gradient_clip_val: 1.0}
model: {class: planned_task.Task, width: 12}
"""


def plan(capsys, *arguments):
    status = main(["plan", "--config", "run.yaml", *arguments])
    out, err = capsys.readouterr()
    return status, out, err
