"""A diffusion trainer: a global batch that is split, an endless loader, accumulation by hand, an EMA, one save file."""

import copy
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader


def cycle(loader):
    while True:
        yield from loader


class Trainer:
    def __init__(self, model, dataset, *, batch_size=8, accumulate_every=2, steps=4, amp=False, folder="."):
        self.accelerator = Accelerator(
            dataloader_config=DataLoaderConfiguration(split_batches=True), mixed_precision="fp16" if amp else "no"
        )
        self.accelerator.native_amp = amp
        self.model, self.steps, self.accumulate_every, self.folder = model, steps, accumulate_every, Path(folder)
        loader = self.accelerator.prepare(DataLoader(dataset, batch_size=batch_size, shuffle=False, pin_memory=True))
        self.loader = cycle(loader)
        self.opt = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.99))
        if self.accelerator.is_main_process:
            self.ema = copy.deepcopy(model).to(self.accelerator.device)
        self.step = 0
        self.model, self.opt = self.accelerator.prepare(self.model, self.opt)

    def save(self, milestone):
        if not self.accelerator.is_local_main_process:
            return
        scaler = self.accelerator.scaler
        data = {
            "step": self.step,
            "model": self.accelerator.get_state_dict(self.model),
            "opt": self.opt.state_dict(),
            "ema": self.ema.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
        }
        torch.save(data, str(self.folder / f"model-{milestone}.pt"))

    def load(self, milestone):
        path = str(self.folder / f"model-{milestone}.pt")
        data = torch.load(path, map_location="cpu", weights_only=True)
        self.accelerator.unwrap_model(self.model).load_state_dict(data["model"])
        self.step = data["step"]
        self.opt.load_state_dict(data["opt"])
        if self.accelerator.is_main_process:
            self.ema.load_state_dict(data["ema"])
        if self.accelerator.scaler is not None and data["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(data["scaler"])

    def train(self):
        accelerator, losses = self.accelerator, []
        while self.step < self.steps:
            self.model.train()
            total_loss = 0.0
            for _ in range(self.accumulate_every):
                data = next(self.loader).to(accelerator.device)
                with self.accelerator.autocast():
                    loss = nn.functional.mse_loss(self.model(data), data) / self.accumulate_every
                    total_loss += loss.item()
                self.accelerator.backward(loss)
            accelerator.wait_for_everyone()
            accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.opt.step()
            self.opt.zero_grad()
            accelerator.wait_for_everyone()
            self.step += 1
            losses.append(total_loss)
            if accelerator.is_main_process:
                with torch.no_grad():
                    for mine, theirs in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                        mine.lerp_(theirs, 0.1)
        accelerator.print("training complete")
        return losses


def main(folder):
    torch.manual_seed(1)
    images = torch.randn(48, 6)
    make = lambda steps: Trainer(
        nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 6)), images, steps=steps, folder=folder
    )
    first = make(3)
    results = {"losses": first.train()}
    first.save(1)
    first.accelerator.wait_for_everyone()
    second = make(5)
    second.load(1)
    results["more"] = second.train()
    if second.accelerator.is_main_process:
        results["ema"] = sum(p.abs().sum().item() for p in second.ema.parameters())
    results["weights"] = sum(p.abs().sum().item() for p in second.model.parameters())
    return results
