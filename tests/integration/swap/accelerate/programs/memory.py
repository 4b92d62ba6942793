"""A batch size that is halved until it fits; all memory is freed in between, and what a model took is released."""

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, release_memory, set_seed
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(folder):
    accelerator = Accelerator()
    tried, results = [], {}
    samples = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(2)))

    @find_executable_batch_size(starting_batch_size=32)
    def inner_training_loop(batch_size):
        nonlocal accelerator
        accelerator.free_memory()
        tried.append(batch_size)
        set_seed(73)
        model = nn.Linear(4, 4).to(device=accelerator.device)
        optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-2)
        loader = DataLoader(samples, batch_size=batch_size // accelerator.num_processes)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=8)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        losses = []
        for (x,) in loader:
            if batch_size > 8:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            loss = (model(x) - x).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
        return losses

    results["losses"] = inner_training_loop()
    results["tried"] = tried

    results["reduce"] = [should_reduce_batch_size(e) for e in (RuntimeError("CUDA out of memory."), ValueError("CUDA"))]
    results["released"] = release_memory(torch.ones(2), torch.ones(3))
    accelerator.clear()
    return results
