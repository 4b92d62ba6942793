"""One list of losses: whatever the door, the processes, the strategy, the precision and the split into micro-batches.

The reference is a loop written by hand, in one process, that takes each optimizer step on the plain mean over the
samples of the whole group.
"""

import functools

import pytest
import torch
from support.differences import whole
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.strategies import FSDP

import treadle

SAMPLES, GLOBAL_BATCH, EPOCHS = 45, 8, 2
PRECISIONS = {"64-true": 1e-12, "32-true": 2e-6, "bf16-mixed": 2e-2}
SETTINGS = [(precision, accumulate) for precision in PRECISIONS for accumulate in (1, 4)]
WORLDS = {"1p": 1, "ddp-2p": 2, "fsdp-2p": 2, "hybrid-4p": 4}
MARKS = {"fsdp-2p": pytest.mark.exhaustive, "hybrid-4p": pytest.mark.exhaustive}
GRID = [
    pytest.param(door, place, *setting, id=f"{door}-{place}-{setting[0]}-k{setting[1]}", marks=MARKS.get(place, ()))
    for door in ("trainer", "own_loop")
    for place in WORLDS
    for setting in SETTINGS
]


def strategy(place):
    if place.startswith("fsdp"):
        return FSDP(auto_wrap_policy={nn.Linear})
    if place.startswith("hybrid"):
        return FSDP(auto_wrap_policy={nn.Linear}, data_parallel_replicate=2)
    return "auto"


def dataset():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


def network():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


class Task(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = network()
        self.seen = []
        torch.manual_seed(7)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def on_step_end(self):
        self.seen.append(whole_loss(self))


@torch.no_grad()
def whole_loss(model):
    """The loss of the whole dataset, in float64, on a copy: what all runs are compared by."""
    x, y = dataset().tensors
    weights = {name: whole(p) for name, p in model.net.state_dict().items()}
    with torch.device("meta"):  # draws no random numbers
        net = network()
    net.load_state_dict(weights, assign=True)
    net.double()
    return nn.functional.cross_entropy(net(x.double()), y).item()


def reference(precision, accumulate):
    task = Task()
    optimizer = task.configure_optimizers()
    if precision == "64-true":
        task.double()
    loader = DataLoader(dataset(), batch_size=GLOBAL_BATCH, shuffle=True)
    losses = []
    for _ in range(EPOCHS):
        batches = list(loader)
        for start in range(0, len(batches), accumulate):
            group = batches[start : start + accumulate]
            x = torch.cat([b[0] for b in group]).to(task.net[0].weight.dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                loss = nn.functional.cross_entropy(task(x), torch.cat([b[1] for b in group]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(whole_loss(task))
    return losses


def by_trainer(place, precision, accumulate):
    task = Task()
    flags = {"precision": precision, "accumulate_grad_batches": accumulate}
    trainer = make_trainer(max_epochs=EPOCHS, strategy=strategy(place), **flags)
    trainer.fit(task, DataLoader(dataset(), batch_size=GLOBAL_BATCH // WORLDS[place], shuffle=True))
    return task.seen


def by_own_loop(place, precision, accumulate):
    task = Task()
    accelerator = treadle.Accelerator(
        cpu=True, strategy=strategy(place), mixed_precision=precision, gradient_accumulation_steps=accumulate
    )
    loader = DataLoader(dataset(), batch_size=GLOBAL_BATCH // WORLDS[place], shuffle=True)
    model, optimizer, loader = accelerator.prepare(task, task.configure_optimizers(), loader)
    losses = []
    for _ in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                losses.append(whole_loss(accelerator.unwrap_model(model)))
    return losses


def all_settings(door, place):
    """Every setting, one after the other in the same processes."""
    by = by_trainer if door == "trainer" else by_own_loop
    return {setting: by(place, *setting) for setting in SETTINGS}


@functools.cache
def runs(door, place):
    return run(all_settings, WORLDS[place], door, place)


@pytest.mark.parametrize(("door", "place", "precision", "accumulate"), GRID)
def test_one_list_of_losses(door, place, precision, accumulate):
    wanted = reference(precision, accumulate)
    assert len(wanted) == EPOCHS * -(-6 // accumulate)
    for rank in runs(door, place):
        assert rank[precision, accumulate] == pytest.approx(wanted, abs=PRECISIONS[precision])


@pytest.mark.parametrize("place", [pytest.param(place, marks=MARKS.get(place, ())) for place in WORLDS])
def test_own_loop_is_bit_equal_to_the_trainer(place):
    assert runs("trainer", place) == runs("own_loop", place)
