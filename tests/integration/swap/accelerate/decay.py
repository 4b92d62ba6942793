"""A loop for Accelerate as people publish them: accumulation, clipping, AdamW, a warm-up and a decay to zero.

accelerate launch --cpu --num_processes 2 decay.py [--set_epoch] [--data_seed 7]
"""

import argparse
import json
import math

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data(samples=96):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--set_epoch", action="store_true")
    parser.add_argument("--data_seed", type=int)
    args = parser.parse_args(argv)

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.data_seed),
    )
    set_seed(42)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    train_dataloader = DataLoader(make_data(), shuffle=True, batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, weight_decay=0.1)
    num_epochs, warmup = 4, 6
    max_train_steps = num_epochs * math.ceil(len(train_dataloader) / accelerator.gradient_accumulation_steps)

    def factor(step):
        if step < warmup:
            return step / warmup
        return max(0.0, (max_train_steps - step) / (max_train_steps - warmup))

    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )

    losses, norms, rates = [], [], []
    for epoch in range(num_epochs):
        model.train()
        if args.set_epoch:
            train_dataloader.set_epoch(10 * epoch)
        for inputs, targets in train_dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
            if accelerator.sync_gradients:
                rates.append(lr_scheduler.get_last_lr()[0])
    weights = torch.cat([p.detach().flatten() for p in accelerator.unwrap_model(model).parameters()])
    results = {"losses": losses, "norms": norms, "rates": rates, "weights": weights.norm().item()}
    accelerator.print(json.dumps(results))
    accelerator.end_training()
    return results


if __name__ == "__main__":
    main()
