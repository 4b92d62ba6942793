"""Several networks, one of them absent: a None among what is prepared, schedulers that are not, rates set by hand."""

from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.unets, self.clip = nn.ModuleList([nn.Identity(), nn.Linear(4, 4)]), None

    def forward(self, x, unet_number):
        return (self.unets[unet_number - 1](x) - x.roll(1, -1)).pow(2).mean()


def main(folder):
    accelerator = Accelerator()
    torch.manual_seed(29)
    decoder = Decoder()
    make = lambda unet: torch.optim.Adam(unet.parameters(), lr=1e-2, weight_decay=1e-2, eps=1e-8)
    optimizers = [None if isinstance(unet, nn.Identity) else make(unet) for unet in decoder.unets]
    schedulers = [each and torch.optim.lr_scheduler.CosineAnnealingLR(each, T_max=10) for each in optimizers]
    assert accelerator.distributed_type != DistributedType.DEEPSPEED
    decoder, *optimizers = list(accelerator.prepare(decoder, *optimizers))
    samples = TensorDataset(torch.randn(40, 4))
    loaders = {"train": DataLoader(samples, batch_size=8), "val": DataLoader(samples, batch_size=20)}
    train_loader, val_loader = accelerator.prepare(loaders["train"], loaders["val"])
    assert optimizers[0] is None
    optimizer, scheduler = optimizers[1], schedulers[1]
    losses, rates = [], []
    for (x,) in train_loader:
        total = 0.0
        for chunk in x.split(4):
            with accelerator.autocast():
                loss = decoder(chunk, unet_number=2) * (len(chunk) / len(x))
            total += loss.item()
            accelerator.backward(loss)
        accelerator.clip_grad_norm_(decoder.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total)
        rates.append(optimizer.param_groups[0]["lr"])
    with torch.no_grad():
        valid = [accelerator.gather_for_metrics(decoder(x, unet_number=2)).mean().item() for (x,) in val_loader]
    path = Path(folder) / "decoder.pt"
    state = {"model": accelerator.unwrap_model(decoder).state_dict(), "optim1": optimizer.state_dict(), "optim0": None}
    accelerator.save(state, str(path))
    loaded = torch.load(str(path), map_location="cpu", weights_only=True)
    optimizer.load_state_dict(loaded["optim1"])
    for group in optimizer.param_groups:
        group["lr"] = 3e-3 if group["lr"] > 0.0 else 0.0
    return {
        "losses": losses,
        "rates": rates,
        "valid": valid,
        "keys": sorted(loaded),
        "lr": optimizer.param_groups[0]["lr"],
    }
