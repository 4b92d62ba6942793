"""One network of a cascade is trained: a scaler of one's own put on the accelerator and on its optimizers."""

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def patched(accelerated_optimizer, method):
    def step(*args, **kwargs):
        accelerated_optimizer._accelerate_step_called = True
        return method(*args, **kwargs)

    return step


def main(folder):
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    accelerator = Accelerator(**{"split_batches": True, "mixed_precision": "no", "kwargs_handlers": handlers})
    torch.manual_seed(2)
    unets = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)]).to(accelerator.device)
    optimizers = [torch.optim.Adam(unet.parameters(), lr=1e-2, eps=1e-8, betas=(0.9, 0.99)) for unet in unets]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loader = DataLoader(TensorDataset(torch.randn(40, 5)), batch_size=8)
    unet, loader, optimizer = accelerator.prepare(unets[1], loader, optimizers[1])
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[1], T_max=8))
    distributed = not (accelerator.distributed_type == DistributedType.NO and accelerator.num_processes == 1)
    losses, rates, norms = [], [], []
    for (images,) in loader:
        accelerator.scaler = scaler
        for each in accelerator._optimizers:
            each.scaler = scaler
            each._accelerate_step_called = False
            each._optimizer_original_step_method = each.optimizer.step
            each._optimizer_patched_step_method = patched(each, each.optimizer.step)
        total = 0.0
        for chunk in images.split(2):
            with accelerator.autocast():
                loss = nn.functional.mse_loss(unet(chunk), chunk.flip(1)) * (len(chunk) / len(images))
            total += loss.item()
            accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(unet.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        if not accelerator.optimizer_step_was_skipped:
            scheduler.step()
        losses.append(total)
        rates.append(optimizer.param_groups[0]["lr"])
    accelerator.wait_for_everyone()
    weights = accelerator.unwrap_model(unet).weight.abs().sum().item()
    return {"losses": losses, "rates": rates, "norms": norms, "weights": weights, "distributed": distributed}
