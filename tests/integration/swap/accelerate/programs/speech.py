"""A schedule made of the prepared optimizer, prepared afterwards; an EMA prepared with the model."""

import copy
import os

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.optim.lr_scheduler import LinearLR, SequentialLR
from torch.utils.data import DataLoader


class EMA(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.online = (model,)
        self.ema_model = copy.deepcopy(model).requires_grad_(False)
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def update(self):
        self.updates += 1
        for mine, theirs in zip(self.ema_model.parameters(), self.online[0].parameters(), strict=True):
            mine.lerp_(theirs, 0.2)


def collate(items):
    lengths = torch.full((len(items),), 3)
    return {"text": [str(int(x[0] > 0)) for x in items], "mel": torch.stack(items), "mel_lengths": lengths}


class Trainer:
    def __init__(self, model, folder, accumulation=2, warmup=3, **accelerate_kwargs):
        handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
        options = {"kwargs_handlers": handlers, "gradient_accumulation_steps": accumulation, **accelerate_kwargs}
        self.accelerator = Accelerator(log_with="all", **options)
        self.model, self.ema_model, self.warmup = model, EMA(model), warmup
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
        parts = self.accelerator.prepare(self.ema_model, self.model, self.optimizer)
        self.ema_model, self.model, self.optimizer = parts
        self.path = os.path.join(folder, "model.pth")

    def save_checkpoint(self, step):
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            checkpoint = {"model": self.accelerator.unwrap_model(self.model).state_dict(), "step": step}
            checkpoint |= {"optimizer": self.optimizer.state_dict(), "ema": self.ema_model.state_dict()}
            checkpoint["scheduler"] = {"last_epoch": self.scheduler.state_dict()["last_epoch"]}
            self.accelerator.save(checkpoint, self.path)

    def train(self, dataset, epochs, batch_size):
        loader = DataLoader(dataset, batch_size=batch_size, collate_fn=collate, shuffle=False)
        total = len(loader) * epochs
        warmup = LinearLR(self.optimizer, start_factor=1e-8, end_factor=1.0, total_iters=self.warmup)
        decay = LinearLR(self.optimizer, start_factor=1.0, end_factor=1e-8, total_iters=total - self.warmup)
        self.scheduler = SequentialLR(self.optimizer, schedulers=[warmup, decay], milestones=[self.warmup])
        loader, self.scheduler = self.accelerator.prepare(loader, self.scheduler)
        step, losses, rates = 0, [], []
        for _ in range(epochs):
            self.model.train()
            for batch in loader:
                with self.accelerator.accumulate(self.model):
                    loss = (self.model(batch["mel"]) - batch["mel"]).abs().mean()
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.accelerator.unwrap_model(self.ema_model).update()
                step += 1
                losses.append(loss.item())
                rates.append(self.scheduler.get_last_lr()[0])
        self.save_checkpoint(step)
        self.accelerator.wait_for_everyone()
        return losses, rates


def main(folder):
    torch.manual_seed(7)
    trainer = Trainer(nn.Linear(3, 3), folder)
    losses, rates = trainer.train(list(torch.randn(32, 3)), 2, 4 // trainer.accelerator.num_processes)
    saved = torch.load(trainer.path, weights_only=True)
    return {
        "losses": losses,
        "rates": rates,
        "step": saved["step"],
        "optimizer_steps": float(saved["optimizer"]["state"][0]["step"]),
        "scheduler": saved["scheduler"],
        "ema": {name: value.float().sum().item() for name, value in saved["ema"].items()},
    }
