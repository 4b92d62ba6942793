"""A GAN: both networks and optimizers prepared at once, the loader later; gradient penalty; scalers are saved."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import DataLoader


class GAN(nn.Module):
    def __init__(self, **accelerate_kwargs):
        super().__init__()
        handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
        self.accelerator = Accelerator(kwargs_handlers=handlers, mixed_precision="no", **accelerate_kwargs)
        G = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 4))
        D = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1))
        optimizer = lambda model: torch.optim.Adam(model.parameters(), lr=2e-2, betas=(0.5, 0.9))
        self.G, self.D, self.G_opt, self.D_opt = self.accelerator.prepare(G, D, optimizer(G), optimizer(D))
        self.register_buffer("steps", torch.ones(1, dtype=torch.long))

    def set_dataloader(self, loader):
        self.loader = self.accelerator.prepare(loader)

    def save(self, path):
        pkg = {"G": self.accelerator.unwrap_model(self.G).state_dict(), "D_opt": self.D_opt.state_dict()}
        if self.G_opt.scaler is not None:
            pkg["G_scaler"] = self.G_opt.scaler.state_dict()
        torch.save(pkg, str(path))

    def train_discriminator_step(self, real, noise):
        self.D.train()
        self.D_opt.zero_grad()
        real = real.requires_grad_()
        with self.accelerator.autocast():
            with torch.no_grad():
                fake = self.G(noise)
            logits = self.D(real)
            loss = (torch.relu(1 - logits) + torch.relu(1 + self.D(fake))).mean()
        (gradients,) = torch.autograd.grad(logits.sum(), real, create_graph=True)
        penalty = (gradients.norm(2, dim=1) - 1).pow(2).mean()
        self.accelerator.backward(loss + penalty)
        self.D_opt.step()
        return loss, penalty

    def train_generator_step(self, noise):
        self.G_opt.zero_grad()
        self.D_opt.zero_grad()
        loss = -self.D(self.G(noise)).mean()
        self.accelerator.backward(loss)
        self.G_opt.step()
        self.D_opt.zero_grad()
        return loss

    def forward(self):
        logs = []
        for real, noise in self.loader:
            d, penalty = self.train_discriminator_step(real, noise)
            self.accelerator.wait_for_everyone()
            g = self.train_generator_step(noise)
            losses = torch.stack([x.detach() for x in (d, penalty, g)])
            logs.append(self.accelerator.gather(losses[None]).mean(0).tolist())
            self.steps += 1
        return logs


def main(folder):
    torch.manual_seed(19)
    gan = GAN()
    data = torch.utils.data.TensorDataset(torch.randn(48, 4) + 1, torch.randn(48, 3))
    gan.set_dataloader(DataLoader(data, batch_size=8 // gan.accelerator.num_processes, drop_last=True))
    logs = gan()
    path = Path(folder) / f"gan-{gan.accelerator.process_index}.pt"
    gan.save(path)
    saved = torch.load(path, weights_only=True)
    return {
        "logs": logs,
        "G": {name: value.abs().sum().item() for name, value in saved["G"].items()},
        "saved": sorted(saved),
        "state": saved["D_opt"]["state"][0]["exp_avg"].abs().sum().item(),
        "steps": gan.steps.item(),
    }
