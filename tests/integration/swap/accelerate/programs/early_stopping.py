"""Early stopping by a trigger that any process sets; state that is registered for checkpoints; automatic names."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Stopper:
    def __init__(self, patience):
        self.patience, self.best, self.bad, self.stopped_at = patience, float("inf"), 0, -1

    def check(self, loss, step):
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        if self.bad >= self.patience:
            self.stopped_at = step
        return self.bad >= self.patience

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


def main(folder):
    config = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=config)
    set_seed(67)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8 // accelerator.num_processes)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    stopper = Stopper(5)
    accelerator.register_for_checkpointing(stopper)
    losses, saved = [], []
    for epoch in range(4):  # noqa: B007
        for step, (x,) in enumerate(loader):
            loss = (model(x).squeeze(1) - x[:, 0].sign()).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), "mean").item()
            losses.append(mean)
            if accelerator.is_main_process and stopper.check(mean, step):
                accelerator.set_trigger()
            if accelerator.check_trigger():
                break
        else:
            accelerator.save_state()
            saved.append(accelerator.save_iteration)
            continue
        break
    accelerator.wait_for_everyone()
    kept = sorted(os.listdir(os.path.join(folder, "checkpoints")))
    results = {"losses": losses, "epoch": epoch, "saved": saved, "kept": kept}
    if saved:
        weight = accelerator.unwrap_model(model).weight
        before = weight.sum().item()
        accelerator.load_state()
        results["loaded"] = [before, weight.sum().item(), optimizer.param_groups[0]["lr"]]
    return results
