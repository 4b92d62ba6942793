"""An image model's training: hooks that save and load an EMA, checkpoints with a limit, TensorBoard's own writer."""

import copy
import os
from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.logging import get_logger
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader

logger = get_logger(__name__, log_level="INFO")


def train(folder, epochs, resume=False):
    config = ProjectConfiguration(project_dir=folder, logging_dir=os.path.join(folder, "logs"))
    handlers = [InitProcessGroupKwargs(timeout=timedelta(seconds=7200))]
    options = {"mixed_precision": "no", "kwargs_handlers": handlers, "project_config": config}
    accelerator = Accelerator(gradient_accumulation_steps=2, log_with="tensorboard", **options)
    torch.manual_seed(41)
    model = nn.Sequential(nn.Linear(5, 8), nn.SiLU(), nn.Linear(8, 4))
    ema = copy.deepcopy(model)
    calls = []

    def save_model_hook(models, weights, output_dir):
        calls.append(["save", len(models), len(weights)])
        if accelerator.is_main_process:
            torch.save(ema.state_dict(), os.path.join(output_dir, "ema.pt"))

    def load_model_hook(models, input_dir):
        calls.append(["load", len(models)])
        ema.load_state_dict(torch.load(os.path.join(input_dir, "ema.pt"), weights_only=True))

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)
    logger.info(accelerator.state, main_process_only=False)
    images = torch.cat([torch.randn(32, 4), torch.randn(32, 4), torch.rand(32, 1)], 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, betas=(0.95, 0.999))
    loader = DataLoader(images, batch_size=4 // accelerator.num_processes)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.1 * step))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if accelerator.is_main_process:
        accelerator.init_trackers("unconditional")
    global_step = first_epoch = 0
    if resume:
        accelerator.load_state(os.path.join(folder, "checkpoint-4"))
        global_step, first_epoch = 4, 1
    rows = []
    for _ in range(first_epoch, epochs):
        model.train()
        for batch in accelerator.skip_first_batches(loader, 0) if resume else loader:
            clean, noise, time = batch.split([4, 4, 1], 1)
            noisy = clean * (1 - time) + noise * time
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(torch.cat([noisy, time], 1)), noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                with torch.no_grad():
                    for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
                        mine.lerp_(theirs, 0.1)
                global_step += 1
                if accelerator.is_main_process and global_step == 4 and not resume and accelerator.num_processes == 1:
                    accelerator.save_state(os.path.join(folder, f"checkpoint-{global_step}"))
            logs = {"loss": loss.detach().item(), "lr": scheduler.get_last_lr()[0], "step": global_step}
            accelerator.log(logs, step=global_step)
            rows.append(list(logs.values()))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            accelerator.trackers[0].writer.add_images("samples", torch.zeros(1, 3, 2, 2), global_step)
            tracker = accelerator.get_tracker("tensorboard", unwrap=True)
            tracker.add_scalar("by_hand", 1.0, global_step)
    accelerator.end_training()
    return {"rows": rows, "ema": sum(p.abs().sum().item() for p in ema.parameters()), "calls": calls}


def main(folder):
    results = {"whole": train(folder, 2)}
    if os.path.isdir(os.path.join(folder, "checkpoint-4")):
        results["again"] = train(folder, 2, resume=True)
    return results
