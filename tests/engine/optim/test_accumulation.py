"""Loops that call `accumulate` several times for a batch, and the gradients that they see, beside plain loops."""

import pytest
import torch
from processes import run
from torch import nn
from torch.utils.data import DataLoader
from treadle.utils import GradientAccumulationPlugin

import treadle

EPOCHS = 2
LR = 0.05
KINDS = {  # samples, global batch size, calls for each batch
    "slices": (10, 4, lambda batch, width: batch.split(width // 2)),
    "slices of whole batches": (8, 4, lambda batch, width: batch.split(width // 2)),
    "passes": (9, 4, lambda batch, width: [batch] * 3),
    "rollouts": (8, 4, lambda batch, width: [*batch.split(width // 2)] * 2),
}
GRID = [(kind, k, sync) for kind in KINDS for k in (1, 2, 4) for sync in (True, False)]


def rows(count):
    return torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def build():
    torch.manual_seed(1)
    return nn.Linear(3, 1).double()


def loss_of(model, x):
    return (model(x) ** 2).mean()


def norm_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def plain_loop(kind, k, world):
    """Every k-th call is a step on the mean over the calls since the last step, each with the slices of all ranks."""
    samples, width, split = KINDS[kind]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    trace, calls = [], 0
    for _ in range(EPOCHS):
        for batch in rows(samples).split(width):
            shares = [split(share, width // world) for share in batch.chunk(world)]
            for x in map(torch.cat, zip(*shares, strict=True)):
                (loss_of(model, x) / k).backward()
                calls += 1
                if calls % k == 0:
                    trace.append(norm_of(model))
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
    return trace, weights(model)


def own_loop(kind, k, sync):
    samples, width, split = KINDS[kind]
    model = build()
    plugin = GradientAccumulationPlugin(num_steps=k, sync_with_dataloader=sync)
    accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    width //= accelerator.num_processes
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(samples), width))
    trace = []
    for _ in range(EPOCHS):
        for batch in loader:
            for x in split(batch, width):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, x))
                    if accelerator.sync_gradients:
                        trace.append(norm_of(model))
                        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
    return trace, weights(model)


def plain_gan(k, samples=10, width=4):
    """Every k-th batch is a step of both models, and so is the last batch of an epoch."""
    models = [build(), build()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
    trace = []
    for _ in range(EPOCHS):
        batches = rows(samples).split(width)
        for first in range(0, len(batches), k):
            x = torch.cat(batches[first : first + k])
            for model, optimizer, power in zip(models, optimizers, (1, 2), strict=True):
                (loss_of(model, x) * power).backward()
                trace.append(norm_of(model))
                optimizer.step()
                optimizer.zero_grad()
    return trace, weights(models[0]) + weights(models[1])


def own_gan(k, weighted=False, samples=10, width=4):
    accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=k)
    models = [build(), build()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
    loader = DataLoader(rows(samples), width // accelerator.num_processes)
    *models, loader = accelerator.prepare(*models, loader)
    optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers]
    trace = []
    for _ in range(EPOCHS):
        for x in loader:
            for model, power in zip(models, (1, 2), strict=True):  # the steps follow the second backward pass
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, x) * power, weight=len(x) if weighted else None)
                    if accelerator.sync_gradients:
                        trace.append(norm_of(model))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return trace, weights(models[0]) + weights(models[1])


def loops():
    return {
        **{point: own_loop(*point) for point in GRID},
        **{("gan", k, weighted): own_gan(k, weighted) for k in (1, 2, 4) for weighted in (False, True)},
    }


@pytest.fixture(scope="module")
def found():
    return {1: [loops()], 2: run(loops, 2)}


def check(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-10)
    assert one[1] == pytest.approx(other[1], rel=1e-10)


@pytest.mark.guarantee
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("point", GRID, ids=str)
def test_each_call_for_a_batch_is_a_micro_batch(found, world, point):
    for ranks in found[world]:
        check(ranks[point], plain_loop(*point[:2], world))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_two_models_in_turn_share_the_loaders_groups(found, world, k, weighted):
    for ranks in found[world]:
        check(ranks["gan", k, weighted], plain_gan(k))
