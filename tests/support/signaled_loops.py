"""A loop of one's own that signals end."""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.engine import Preempted
from treadle.strategies.distributed.training_clock import progress

import treadle

EPOCHS, SAMPLES = 2, 600


def train(folder, number=None, rank=0, strategy="auto", accumulate=1, watches=True, pause=0.0, **options):
    """Train from the saved state, if any; a signal comes in the third batch."""
    torch.manual_seed(5)
    accelerator = treadle.Accelerator(accelerator="cpu", strategy=strategy, gradient_accumulation_steps=accumulate)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    data = TensorDataset(torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1)))
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=0.01), DataLoader(data, 2, shuffle=True)
    )
    first = accelerator.load_state(folder)["epoch"] if os.path.isdir(folder) else 0
    losses, status = [], None
    exchanges = progress.entered
    try:
        with accelerator.preemptible(**options) as preemption:
            for _epoch in range(first, EPOCHS):
                for (batch,) in loader:
                    with accelerator.accumulate(net):
                        loss = net(batch).square().mean()
                        accelerator.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
                    losses.append(loss.item())
                    time.sleep(pause)
                    if len(losses) == 3 and number is not None and accelerator.process_index == rank:
                        os.kill(os.getpid(), number)
                    if watches and preemption.should_stop():
                        accelerator.save_state(folder)
                        preemption.leave()
        exchanges = progress.entered - exchanges
    except (Preempted, KeyboardInterrupt) as error:
        status = getattr(error, "code", 130)
    return {"status": status, "losses": losses, "steps": accelerator.steps, "drawn": torch.rand(()).item()}, exchanges


def check(first, second, whole, status=143):
    assert (first["status"], second["status"]) == (status, None)
    assert first["losses"] + second["losses"] == whole["losses"]
    assert (second["steps"], second["drawn"]) == (whole["steps"], whole["drawn"])
