"""A generator and discriminators in one model; a module that holds optimizer and scheduler; `no_sync` around losses."""

from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Scheduled(nn.Module):
    def __init__(self, accelerator, optimizer, scheduler=None, scheduler_kwargs=None):
        super().__init__()
        scheduler = scheduler or partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0)
        self.scheduler = scheduler(optimizer, **(scheduler_kwargs or {}))
        self.optimizer = optimizer
        self.optimizer, self.scheduler = accelerator.prepare(self.optimizer, self.scheduler)
        self.accelerator = accelerator

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()
        if not self.accelerator.optimizer_step_was_skipped:
            self.scheduler.step()


class Codec(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 3), nn.Linear(3, 4)
        self.discriminators = nn.ModuleList([nn.Linear(4, 1), nn.Linear(2, 1)])

    def non_discr_parameters(self):
        return [*self.encode.parameters(), *self.decode.parameters()]

    def forward(self, wave, return_discr_losses=False):
        recon = self.decode(torch.tanh(self.encode(wave)))
        views = lambda x: (x, x[:, ::2])
        if return_discr_losses:
            pairs = zip(self.discriminators, views(wave), views(recon.detach()), strict=True)
            return [(torch.relu(1 - d(real)) + torch.relu(1 + d(fake))).mean() for d, real, fake in pairs]
        adversarial = sum(-d(x).mean() for d, x in zip(self.discriminators, views(recon), strict=True))
        return (wave - recon).pow(2).mean() + 0.1 * adversarial


def main(folder):
    accelerator = Accelerator(
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=True),
            InitProcessGroupKwargs(timeout=timedelta(seconds=1800)),
        ],
        split_batches=False,
    )
    torch.manual_seed(0)
    model = Codec()
    adam = lambda parameters: torch.optim.Adam(parameters, lr=2e-2)
    optim = Scheduled(
        accelerator, adam(model.non_discr_parameters()), torch.optim.lr_scheduler.StepLR, {"step_size": 4}
    )
    discr_optims = [Scheduled(accelerator, adam(d.parameters())) for d in model.discriminators]
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8 // accelerator.num_processes, drop_last=True)
    if accelerator.num_processes == 1:  # Accelerate's DDP on CPUs refuses a module without parameters
        model, optim, discr_optims[0], loader = accelerator.prepare(model, optim, discr_optims[0], loader)
        discr_optims[1] = accelerator.prepare(discr_optims[1])
    else:
        model, loader = accelerator.prepare(model, loader)
    batches = iter(loader)
    assert accelerator.distributed_type != DistributedType.FSDP
    accum, logs, norms = 2, [], []
    contexts = [partial(accelerator.no_sync, model), nullcontext]
    for _ in range(2):
        for context in contexts:
            (wave,) = next(batches)
            with accelerator.autocast(), context():
                loss = model(wave.to(accelerator.device))
                accelerator.backward(loss / accum)
            logs.append(accelerator.gather(loss.detach()).mean().item())
        norms.append(float(accelerator.clip_grad_norm_(accelerator.unwrap_model(model).parameters(), 0.5)))
        optim.step()
        optim.zero_grad()
        for each in discr_optims:
            each.zero_grad()
        for context in contexts:
            (wave,) = next(batches)
            with accelerator.autocast(), context():
                total = sum(model(wave, return_discr_losses=True))
                accelerator.backward(total / accum)
            logs.append(accelerator.gather(total.detach()).mean().item())
        for each in discr_optims:
            each.step()
    accelerator.end_training()
    weights = [p.abs().sum().item() for p in accelerator.unwrap_model(model).parameters()]
    return {"logs": logs, "norms": norms, "weights": weights, "rate": optim.scheduler.get_last_lr()}
