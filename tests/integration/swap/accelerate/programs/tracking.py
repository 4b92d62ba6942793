"""Trackers of one's own: `on_main_process`, several at once, what they wrap, tables, and processes that log nothing."""

import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import GeneralTracker, TensorBoardTracker, on_main_process
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class JSONLines(GeneralTracker):
    name = "lines"
    requires_logging_directory = True

    @on_main_process
    def __init__(self, run_name, logging_dir, **kwargs):
        super().__init__()
        self.path = os.path.join(logging_dir, f"{run_name}.jsonl")
        self.file = open(self.path, "a")  # noqa: SIM115

    @property
    def tracker(self):
        return self.file

    @on_main_process
    def store_init_configuration(self, values):
        self.file.write(json.dumps({"config": values}) + "\n")

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.file.write(json.dumps({"step": step, **values, **kwargs}) + "\n")

    @on_main_process
    def finish(self):
        self.file.close()


def main(folder):
    PartialState(cpu=True)
    lines = JSONLines("run", logging_dir=folder)
    accelerator = Accelerator(log_with=["tensorboard", lines], project_dir=folder)
    accelerator.init_trackers("tracking", config={"lr": 0.1, "layers": 2, "name": "net"})
    torch.manual_seed(59)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=8 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    calls = []

    def note(kind):
        return lambda value: calls.append([kind, value])

    each_process = [accelerator.on_main_process(note("main"))]
    each_process += [accelerator.on_process(process_index=accelerator.num_processes - 1)(note("last"))]
    each_process += [accelerator.on_local_main_process(note("local")), accelerator.on_last_process(note("very last"))]
    for step, (x,) in enumerate(loader):
        loss = (model(x).squeeze(1) - x.sum(1)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean").item()
        accelerator.log({"train_loss": mean, "epoch": 0}, step=step, log_kwargs={"lines": {"by": "kwargs"}})
        for each in each_process:
            each(step)
    names = [type(each).__name__ for each in accelerator.trackers]
    results = {"calls": calls}
    if accelerator.is_main_process:
        results["names"] = names
        results["tensorboard"] = isinstance(accelerator.get_tracker("tensorboard"), TensorBoardTracker)
        results["same"] = accelerator.get_tracker("lines") is lines
        results["file"] = accelerator.get_tracker("lines", unwrap=True) is lines.file
        try:
            results["unknown"] = type(accelerator.get_tracker("wandb")).__name__
        except ValueError as error:
            results["unknown"] = type(error).__name__
    accelerator.end_training()
    if accelerator.is_main_process:
        results["written"] = [json.loads(line) for line in Path(lines.path).read_text().splitlines()]
    return results
