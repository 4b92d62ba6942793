"""A video tokenizer's trainer: six objects prepared at once, one more in a list; validation by the main process."""

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader


class Tokenizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.discr = nn.Linear(6, 6), nn.Linear(6, 1)
        self.multiscale_discrs = nn.ModuleList([nn.Linear(3, 1)])

    def forward(self, video, discr=False):
        recon = self.net(video)
        if discr:
            main = torch.relu(1 - self.discr(video)) + torch.relu(1 + self.discr(recon.detach()))
            small = self.multiscale_discrs[0](recon.detach()[:, ::2]) - self.multiscale_discrs[0](video[:, ::2])
            return main.mean(), small.pow(2).mean()
        return (recon - video).pow(2).mean()


def main(folder):
    kwargs = {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]}
    accelerator = Accelerator(**kwargs)
    torch.manual_seed(23)
    model = Tokenizer()
    optimizer, discr_optimizer = (torch.optim.Adam(part.parameters(), lr=2e-2) for part in (model.net, model.discr))
    schedulers = [ExponentialLR(each, gamma=0.9) for each in (optimizer, discr_optimizer)]
    loader = DataLoader(torch.randn(48, 6), batch_size=8 // accelerator.num_processes, drop_last=True)
    valid = DataLoader(torch.randn(6, 6), batch_size=4)
    model, loader, optimizer, discr_optimizer, scheduler, discr_scheduler = accelerator.prepare(
        model, loader, optimizer, discr_optimizer, *schedulers
    )
    inner = accelerator.unwrap_model(model)
    multiscale = [torch.optim.Adam(each.parameters(), lr=2e-2) for each in inner.multiscale_discrs]
    multiscale = [accelerator.prepare(*multiscale)]
    results = {"losses": [], "discr": [], "rates": [], "valid": []}
    mean = lambda value: accelerator.reduce(value.detach(), "mean").item()
    for step, video in enumerate(loader):
        loss = model(video)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(inner.net.parameters(), 0.5)
        optimizer.step()
        if not accelerator.optimizer_step_was_skipped:
            scheduler.step()
        optimizer.zero_grad()
        results["losses"].append(mean(loss))
        accelerator.wait_for_everyone()
        discr_optimizer.zero_grad()
        for each in multiscale:
            each.zero_grad()
        loss, small = model(video, discr=True)
        accelerator.backward(loss + small)
        accelerator.clip_grad_norm_(inner.discr.parameters(), 0.5)
        for each, discr in zip(multiscale, inner.multiscale_discrs, strict=True):
            accelerator.clip_grad_norm_(discr.parameters(), 0.5)
            each.step()
        discr_optimizer.step()
        if not accelerator.optimizer_step_was_skipped:
            discr_scheduler.step()
        results["discr"].append([mean(loss), mean(small)])
        results["rates"].append([scheduler.get_last_lr()[0], discr_scheduler.get_last_lr()[0]])
        accelerator.wait_for_everyone()
        if accelerator.is_main_process and step % 3 == 2:
            with torch.no_grad(), accelerator.autocast():
                results["valid"].append([inner(each).item() for each in valid])
    return results
