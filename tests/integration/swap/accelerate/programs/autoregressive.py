"""A language model: the next batches are read ahead, the loss is over the tokens of all of them on all processes."""

import contextlib
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader


def collate(texts):
    width = max(len(text) for text in texts)
    ids = torch.zeros(len(texts), width, dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    labels = ids[:, 1:].clone()
    labels[labels == 0] = -100
    return {"input_ids": ids[:, :-1], "labels": labels}


def main(folder):
    accumulation = 2
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    set_seed(71)
    texts = [[1 + (i * j) % 9 for j in range(1, 4 + i % 4)] for i in range(40)]
    size = 4 // accelerator.num_processes
    train = DataLoader(texts[:32], shuffle=False, collate_fn=collate, batch_size=size)
    evaluation = DataLoader(texts[32:], shuffle=False, collate_fn=collate, batch_size=size)
    model = nn.Sequential(nn.Embedding(10, 6), nn.Tanh(), nn.Linear(6, 10))
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=2e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
    model, optimizer, train, evaluation, scheduler = accelerator.prepare(model, optimizer, train, evaluation, scheduler)
    total = lambda batch: nn.functional.cross_entropy(
        model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
    )
    updates = math.ceil(len(train) / accumulation)
    results = {"losses": [], "norms": [], "tokens": []}
    for _ in range(2):
        model.train()
        iterator = iter(train)
        for _ in range(updates):
            batches = [next(iterator) for _ in range(accumulation)]
            local = sum(batch["labels"].ne(-100).sum() for batch in batches)
            count = accelerator.gather(local).sum().item()
            losses = []
            for index, batch in enumerate(batches):
                waits = index < len(batches) - 1 and accelerator.num_processes > 1
                with model.no_sync() if waits else contextlib.nullcontext():
                    loss = total(batch) / count * accumulation * accelerator.num_processes
                    accelerator.backward(loss)
                    losses.append(loss.detach())
            results["norms"].append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            whole = accelerator.gather(sum(losses)).sum().item() / (accelerator.num_processes * accumulation)
            results["losses"].append(whole)
            results["tokens"].append(count)
        model.eval()
        losses = []
        for batch in evaluation:
            with torch.no_grad():
                loss = total(batch) / batch["labels"].ne(-100).sum()
            losses.append(accelerator.gather_for_metrics(loss.repeat(size)))
        results["losses"].append(torch.cat(losses).mean().item())
    accelerator.end_training()
    return results
