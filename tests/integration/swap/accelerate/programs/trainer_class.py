"""A trainer class with a run history and callbacks, started by `notebook_launcher`; losses are gathered."""

import os

import torch
from accelerate import Accelerator, notebook_launcher
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, GradScalerKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, model, loss_func, optimizer):
        self.model, self.loss_func, self.optimizer = model, loss_func, optimizer
        self.history = {"train": [], "eval": []}

    def run_epoch(self, loader, training):
        self.model.train(training)
        losses, sizes = [], []
        for x, y in loader:
            with torch.set_grad_enabled(training), self.accelerator.accumulate(self.model):
                loss = self.loss_func(self.model(x), y)
                if training:
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_value_(self.model.parameters(), 0.5)
                    self.optimizer.step()
                    if not self.accelerator.optimizer_step_was_skipped:
                        self.scheduler.step()
                    self.optimizer.zero_grad(set_to_none=True)
            losses.append(self.accelerator.gather(loss.detach() * len(x)).sum())
            sizes.append(self.accelerator.gather(torch.tensor(len(x), device=self.accelerator.device)).sum())
        return (sum(losses) / sum(sizes)).item()

    def train(self, train_dataset, eval_dataset, epochs, batch_size):
        handlers = [DistributedDataParallelKwargs(find_unused_parameters=False), GradScalerKwargs(growth_interval=100)]
        self.accelerator = Accelerator(
            kwargs_handlers=handlers, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False
        )
        size = batch_size // self.accelerator.num_processes
        train, evaluation = DataLoader(train_dataset, size, drop_last=True), DataLoader(eval_dataset, size)
        parts = self.accelerator.prepare(self.model, self.optimizer, train, evaluation)
        self.model, self.optimizer, train, evaluation = parts
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer.optimizer, 4, 0.5)
        self.scheduler = self.accelerator.prepare_scheduler(scheduler)
        for _ in range(epochs):
            self.history["train"].append(self.run_epoch(train, True))
            self.history["eval"].append(self.run_epoch(evaluation, False))
        self.history["rate"] = self.scheduler.get_last_lr()
        self.history["lr"] = self.optimizer.param_groups[0]["lr"]
        self.history["shared"] = bool(AcceleratorState().num_processes == self.accelerator.num_processes)
        self.accelerator.wait_for_everyone()


def training_function(results):
    torch.manual_seed(83)
    x = torch.randn(48, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]])
    model = nn.Linear(3, 1)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.train(TensorDataset(x[:32], y[:32]), TensorDataset(x[32:], y[32:]), 2, 8)
    results.update(trainer.history)


def main(folder):
    results = {}
    if "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        training_function(results)
    else:
        notebook_launcher(training_function, (results,), num_processes=1)
    return results
