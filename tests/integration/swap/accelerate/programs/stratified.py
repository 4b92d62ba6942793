"""A sampler of noise that asks the accelerator where it is: process, micro-batch and their numbers; gather."""

import math

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


def strata(accelerator, size):
    rank, world_size = accelerator.process_index, accelerator.num_processes
    acc_steps = accelerator.gradient_state.num_steps
    group = rank * acc_steps + accelerator.step % acc_steps
    groups = world_size * acc_steps
    return (torch.arange(size) * groups + group + 0.5) / (size * groups)


def compute_features(accelerator, sample, extract, n, batch_size):
    per_process = math.ceil(n / accelerator.num_processes)
    found = []
    for i in range(0, per_process, batch_size):
        current = min(n - i, batch_size)
        found.append(accelerator.gather(extract(sample(current)[:current])))
    return torch.cat(found)[:n]


def main(folder):
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="no")
    torch.manual_seed(37)
    model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(torch.randn(48, 4), batch_size=8 // accelerator.num_processes, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, seen = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            sigma = strata(accelerator, len(batch))
            seen.append([accelerator.step, accelerator.gradient_state.sync_gradients, sigma.sum().item()])
            noised = torch.cat([batch * sigma[:, None], sigma[:, None]], 1)
            losses_batch = (model(noised) - batch).pow(2).mean(1)
            loss = accelerator.gather(losses_batch.detach()).mean().item()
            accelerator.backward(losses_batch.mean())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss)
    start = accelerator.process_index * 10.0
    sample = lambda size: start + torch.arange(size, dtype=torch.float32)[:, None]
    features = compute_features(accelerator, sample, lambda x: x * 2, 10, 3)
    return {"losses": losses, "seen": seen, "features": features.flatten().tolist()}
