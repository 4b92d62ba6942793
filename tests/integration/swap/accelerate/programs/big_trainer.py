"""The inner loop of a large trainer: its own accumulation through `gradient_state`, tokens counted over processes."""

import contextlib
import functools

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, GradientAccumulationPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(folder):
    plugin = GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False)
    config = DataLoaderConfiguration(split_batches=False, dispatch_batches=None, even_batches=True)
    accelerator = Accelerator(dataloader_config=config, gradient_accumulation_plugin=plugin)
    assert getattr(accelerator.state, "deepspeed_plugin", None) is None
    assert getattr(accelerator.state, "fsdp_plugin", None) is None
    assert isinstance(accelerator.state, AcceleratorState)
    torch.manual_seed(43)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    tokens = torch.randint(0, 11, (48, 5))
    weights = (torch.rand(48, 5) > 0.3).long()
    loader = DataLoader(TensorDataset(tokens, tokens.roll(-1, 1) * weights - 100 * (1 - weights)), batch_size=4)
    accelerator.free_memory()
    loader = accelerator.prepare(loader)
    model.train()
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    accumulation, results = 2, {"losses": [], "norms": [], "tokens": [], "rates": [], "synced": []}
    for epoch in range(2):
        active = skip_first_batches(loader, 2) if epoch == 0 else loader
        batches = list(active)
        for start in range(0, len(batches), accumulation):
            group = batches[start : start + accumulation]
            count = sum((labels != -100).sum() for _, labels in group)
            count = accelerator.gather(count).sum()
            results["tokens"].append(count.item())
            step_loss = torch.tensor(0.0)
            for index, (inputs, labels) in enumerate(group):
                do_sync = index == len(group) - 1
                accelerator.gradient_state._set_sync_gradients(do_sync)
                waits = not do_sync and accelerator.distributed_type != DistributedType.DEEPSPEED
                context = functools.partial(accelerator.no_sync, model=model) if waits else contextlib.nullcontext
                with context():
                    logits = model(inputs).flatten(0, 1)
                    loss = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
                    loss = loss / count * accelerator.num_processes
                    accelerator.backward(loss)
                step_loss += loss.detach()
                results["synced"].append(accelerator.sync_gradients)
            results["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            if not accelerator.optimizer_step_was_skipped:
                scheduler.step()
            model.zero_grad()
            results["losses"].append(accelerator.gather(step_loss).mean().item())
            results["rates"].append(scheduler.get_last_lr()[0])
    results["models"] = len(accelerator._models)
    accelerator.free_memory()
    return results
