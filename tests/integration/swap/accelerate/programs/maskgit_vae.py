"""A VAE and its discriminator with two optimizers over sets of parameters, a prepared EMA, `accelerator.save`."""

import copy
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


class EMA(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.online_model = model
        self.ema_model = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self):
        for mine, theirs in zip(self.ema_model.parameters(), self.online_model.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.discr = nn.Sequential(nn.Linear(6, 2), nn.GELU(), nn.Linear(2, 6)), nn.Linear(6, 1)

    def forward(self, img, return_loss=False, return_discr_loss=False, return_recons=False):
        recons = self.net(img)
        if return_discr_loss:
            return (torch.relu(1 - self.discr(img)) + torch.relu(1 + self.discr(recons.detach()))).mean()
        if return_loss:
            return nn.functional.mse_loss(recons, img) - 0.1 * self.discr(recons).mean()
        return recons


class Images(Dataset):
    def __init__(self):
        self.values = torch.randn(40, 6, generator=torch.Generator().manual_seed(9))

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]


def cycle(loader):
    while True:
        yield from loader


def main(folder):
    kwargs = {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]}
    accelerator = Accelerator(**kwargs)
    torch.manual_seed(5)
    vae = VAE()
    discr_parameters = set(vae.discr.parameters())
    rest = [p for p in vae.parameters() if p not in discr_parameters]
    optim, discr_optim = torch.optim.Adam(rest, lr=3e-2), torch.optim.Adam(vae.discr.parameters(), lr=3e-2)
    dataset, valid = random_split(Images(), [32, 8], generator=torch.Generator().manual_seed(42))
    size = 4 // accelerator.num_processes
    loader, valid_loader = DataLoader(dataset, batch_size=size), DataLoader(valid, batch_size=size)
    prepared = accelerator.prepare(vae, optim, discr_optim, loader, valid_loader)
    vae, optim, discr_optim, loader, valid_loader = prepared
    ema = accelerator.prepare(EMA(accelerator.unwrap_model(vae)))
    batches, valid_batches = cycle(loader), cycle(valid_loader)
    distributed = not (accelerator.distributed_type == DistributedType.NO and accelerator.num_processes == 1)
    results = {"losses": [], "recons": []}
    for _ in range(3):
        vae.train()
        discr = accelerator.unwrap_model(vae).discr
        for _ in range(2):
            img = next(batches).to(accelerator.device)
            with accelerator.autocast():
                loss = vae(img, return_loss=True)
            accelerator.backward(loss / 2)
            results["losses"].append(accelerator.gather(loss.detach()).mean().item())
        accelerator.clip_grad_norm_(vae.parameters(), 0.7)
        optim.step()
        optim.zero_grad()
        discr_optim.zero_grad()
        for _ in range(2):
            loss = vae(next(batches), return_discr_loss=True)
            accelerator.backward(loss / 2)
            results["losses"].append(accelerator.gather(loss.detach()).mean().item())
        accelerator.clip_grad_norm_(discr.parameters(), 0.5)
        discr_optim.step()
        accelerator.unwrap_model(ema).update()
        for model in (vae, accelerator.unwrap_model(ema).ema_model):
            model.eval()
            with torch.no_grad():
                recons = model(next(valid_batches), return_recons=True)
            results["recons"].append(accelerator.gather(recons).abs().sum().item())
    accelerator.wait_for_everyone()
    path = Path(folder) / "vae.pt"
    if accelerator.is_main_process:
        accelerator.save(accelerator.unwrap_model(vae).state_dict(), str(path))
        accelerator.save(accelerator.unwrap_model(ema).state_dict(), str(path.with_suffix(".ema.pt")))
    accelerator.wait_for_everyone()
    saved = torch.load(path, weights_only=True)
    whole = accelerator.get_state_dict(vae)
    assert saved.keys() == whole.keys()
    results["saved"] = {name: value.sum().item() for name, value in saved.items()}
    results["ema"] = sorted(torch.load(path.with_suffix(".ema.pt"), weights_only=True))
    results["distributed"] = distributed
    return results
