"""A text classifier's fine-tuning without a trainer class: `get_logger`, checkpoints by steps, a resume, metrics."""

import logging
import math
import os

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logger = get_logger(__name__)


def train(folder, stop_after=None, resume_from_checkpoint=None):
    accelerator = Accelerator(gradient_accumulation_steps=2, project_dir=folder)
    logging.basicConfig(level=logging.INFO)
    logger.info(accelerator.state, main_process_only=False)
    set_seed(42)
    with accelerator.main_process_first():
        x = torch.randn(80, 6)
        y = (x[:, :3].sum(1) > 0).long()
    size = 4 // accelerator.num_processes
    train_dataloader = DataLoader(TensorDataset(x[:48], y[:48]), batch_size=size)
    eval_dataloader = DataLoader(TensorDataset(x[48:75], y[48:75]), batch_size=size)
    model = nn.Linear(6, 2)
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-2)
    epochs, updates_per_epoch = 2, math.ceil(len(train_dataloader) / accelerator.gradient_accumulation_steps)
    max_train_steps = epochs * updates_per_epoch
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / max_train_steps))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    completed_steps = starting_epoch = 0
    resume_step = None
    if resume_from_checkpoint:
        accelerator.print(f"Resumed from checkpoint: {resume_from_checkpoint}")
        accelerator.load_state(resume_from_checkpoint)
        name = os.path.splitext(os.path.basename(resume_from_checkpoint))[0]
        resume_step = int(name.replace("step_", "")) * accelerator.gradient_accumulation_steps
        starting_epoch = resume_step // len(train_dataloader)
        completed_steps = resume_step // accelerator.gradient_accumulation_steps
        resume_step -= starting_epoch * len(train_dataloader)
    history, losses = [], []
    for epoch in range(starting_epoch, epochs):
        model.train()
        total_loss, active = 0, train_dataloader
        if resume_step is not None and epoch == starting_epoch:
            active = accelerator.skip_first_batches(train_dataloader, resume_step)
        for batch in active:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if accelerator.sync_gradients:
                completed_steps += 1
                if completed_steps == stop_after:
                    accelerator.save_state(os.path.join(folder, f"step_{completed_steps}"))
                    return {"losses": losses}
        model.eval()
        right = count = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(batch[0]).argmax(dim=-1)
            predictions, references = accelerator.gather((predictions, batch[1]))
            if accelerator.num_processes > 1:  # as scripts did before there was gather_for_metrics
                left = len(eval_dataloader.dataset) - count
                predictions, references = predictions[:left], references[:left]
            right += (predictions == references).sum().item()
            count += len(references)
        found = {"accuracy": right / count, "count": count}
        logger.info(f"epoch {epoch}: {found}")
        history.append([found, total_loss.item(), lr_scheduler.get_last_lr()[0], completed_steps])
    accelerator.wait_for_everyone()
    return {"losses": losses, "history": history, "max_train_steps": max_train_steps}


def main(folder):
    whole, first = train(folder), train(folder, stop_after=8)
    second = train(folder, resume_from_checkpoint=os.path.join(folder, "step_8"))
    return {"whole": whole, "first": first, "second": second}
