"""Batches by length from a batch sampler with `set_epoch`; uneven batches; a resume by `skip_first_batches`."""

import math
import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LinearLR, SequentialLR
from torch.utils.data import DataLoader, Sampler


class Lengths(Sampler):
    """Puts samples into batches of at most ``frames`` frames; an epoch has its order of batches."""

    def __init__(self, lengths, frames, seed):
        self.batches, self.seed, self.epoch, taken = [[]], seed, 0, 0
        for index in sorted(range(len(lengths)), key=lengths.__getitem__):
            if taken + lengths[index] > frames:
                self.batches.append([])
                taken = 0
            self.batches[-1].append(index)
            taken += lengths[index]
        self.drop_last = True

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return (self.batches[i] for i in torch.randperm(len(self.batches), generator=generator).tolist())

    def __len__(self):
        return len(self.batches)


def collate(items):
    return {"mel": nn.utils.rnn.pad_sequence(items, batch_first=True), "lengths": torch.tensor([len(x) for x in items])}


def train(folder, epochs, stop=None, resume=False):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(11)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-1, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.even_batches = False
    data = [torch.linspace(0, 1, 2 + index % 5)[:, None] for index in range(28)]
    sampler = Lengths([len(x) for x in data], 16, seed=3)
    loader = DataLoader(data, collate_fn=collate, batch_sampler=sampler)
    warmup_updates = 2 * accelerator.num_processes
    total_updates = math.ceil(len(loader) / 2) * epochs
    warmup = LinearLR(optimizer, start_factor=1e-8, end_factor=1.0, total_iters=warmup_updates)
    decay = LinearLR(optimizer, start_factor=1.0, end_factor=1e-8, total_iters=total_updates - warmup_updates)
    scheduler = SequentialLR(optimizer, schedulers=[warmup, decay], milestones=[warmup_updates])
    loader, scheduler = accelerator.prepare(loader, scheduler)
    path, update = os.path.join(folder, "model_last.pt"), 0
    if resume:
        checkpoint = torch.load(path, weights_only=True, map_location="cpu")
        accelerator.unwrap_model(model).load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        update = checkpoint["update"]
    skipped_epoch, skipped_batch = divmod(update * 2, len(loader))
    skipped_loader = accelerator.skip_first_batches(loader, num_batches=skipped_batch)
    results = {"losses": [], "rates": [], "length": len(loader)}
    for epoch in range(skipped_epoch, epochs):
        model.train()
        current = skipped_loader if resume and epoch == skipped_epoch else loader
        if hasattr(loader.batch_sampler, "set_epoch"):
            loader.batch_sampler.set_epoch(epoch)
        for batch in current:
            with accelerator.accumulate(model):
                loss = (model(batch["mel"]) - 2 * batch["mel"]).pow(2).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            results["losses"].append(loss.item())
            if accelerator.sync_gradients:
                update += 1
                results["rates"].append(scheduler.get_last_lr()[0])
                if update == stop:
                    state = {"model": accelerator.unwrap_model(model).state_dict(), "update": update}
                    state |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
                    accelerator.wait_for_everyone()
                    if accelerator.is_main_process:
                        accelerator.save(state, path)
                    accelerator.wait_for_everyone()
                    return results
    return results


def main(folder):
    return {"whole": train(folder, 2), "first": train(folder, 2, stop=3), "second": train(folder, 2, resume=True)}
