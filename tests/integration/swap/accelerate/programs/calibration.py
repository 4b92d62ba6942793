"""A compression session: only a loader is prepared at first; a teacher; weights saved by a function."""

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def save_pretrained(model, folder, is_main_process, save_function, state_dict=None):
    state = state_dict or model.state_dict()
    if is_main_process:
        os.makedirs(folder, exist_ok=True)
        save_function(state, os.path.join(folder, "weights.pt"))
    return sorted(state)


def main(folder):
    accelerator = Accelerator()
    torch.manual_seed(79)
    with accelerator.main_process_first():
        samples = TensorDataset(torch.randn(32, 4))
    with accelerator.local_main_process_first():
        model, teacher = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), nn.Linear(4, 3)
    loader = accelerator.prepare(DataLoader(samples, batch_size=4 // accelerator.num_processes))
    highest = torch.zeros(6)
    with torch.no_grad():
        for (x,) in loader:
            highest = torch.maximum(highest, model[:2](x).amax(0))
    highest = accelerator.gather(highest[None]).amax(0)
    mask = (model[0].weight.abs() > 0.1).float()
    teacher = accelerator.prepare(teacher)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    losses = []
    for (x,) in loader:
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        loss = nn.functional.kl_div(model(x).log_softmax(-1), target, reduction="batchmean")
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            accelerator.unwrap_model(model)[0].weight.mul_(mask)
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model, unwrap=False)
    unwrapped = accelerator.unwrap_model(model)
    names = save_pretrained(
        unwrapped,
        os.path.join(folder, "model"),
        accelerator.is_main_process,
        accelerator.save,
        state_dict=unwrapped.state_dict(),
    )
    accelerator.wait_for_everyone()
    accelerator.save_model(model, os.path.join(folder, "safe"), max_shard_size="1KB")
    accelerator.wait_for_everyone()
    zeros = (unwrapped[0].weight == 0).sum().item()
    return {
        "losses": losses,
        "highest": highest.tolist(),
        "names": names,
        "wrapped": len(state),
        "zeros": zeros,
        "files": sorted(os.listdir(os.path.join(folder, "safe"))),
        "sum": sum(value.abs().sum().item() for value in state.values()),
    }
