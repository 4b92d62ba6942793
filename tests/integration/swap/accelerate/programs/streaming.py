"""A stream without a length: read by each process, then by the main process alone; `split_between_processes`."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        for index in range(self.size):
            yield {"x": torch.tensor([index / self.size, 1.0]), "index": torch.tensor(index)}


def train(dispatch):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    torch.manual_seed(89)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = 8 // accelerator.num_processes
    loader = DataLoader(Stream(32), batch_size=size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, order = [], []
    for batch in loader:
        loss = (model(batch["x"]).squeeze(1) - batch["x"][:, 0]).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        order.append(accelerator.gather_for_metrics(batch["index"]).sum().item())
    evaluation = accelerator.prepare(DataLoader(Stream(16), batch_size=2))
    rows = sum(len(accelerator.gather_for_metrics(batch["index"])) for batch in evaluation)
    return {"losses": losses, "order": order, "rows": rows, "weight": accelerator.unwrap_model(model).weight.tolist()}


def main(folder):
    state = PartialState(cpu=True)
    results = {"own": train(False), "dispatched": train(True)}
    with state.split_between_processes(list(range(5)), apply_padding=True) as mine:
        results["padded"] = mine
    with state.split_between_processes({"a": [1, 2, 3], "b": torch.arange(3)}) as mine:
        results["dict"] = [mine["a"], mine["b"].tolist()]
    with state.split_between_processes(["one", "two", "three"]) as prompts:
        results["prompts"] = gather_object([f"{prompt}!" for prompt in prompts])
    return results
