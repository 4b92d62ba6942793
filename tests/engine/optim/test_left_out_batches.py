"""A loop that leaves out some batches with ``continue``: a step's gradient is the mean over the ones it computed on."""

import pytest
import torch
from support.processes import run
from torch.utils.data import DataLoader

import treadle


def steps(left_out, loader_size=12, accumulate=3, stop=None):
    """Return what each step's gradient was, of a loss whose gradient is the batch's mean."""
    accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = torch.nn.Linear(1, 1, bias=False)
    rows = torch.arange(1.0, loader_size + 1)[:, None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=1, shuffle=False))
    seen, found = [], []
    for epoch in range(1 if stop is None else 2):
        for number, batch in enumerate(loader):
            if number in left_out:
                continue
            if epoch == 0 and number == stop:
                break
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                seen.append(batch.item())
                if accelerator.sync_gradients:
                    (weight,) = model.parameters()
                    found.append((weight.grad.item(), list(seen)))
                    seen.clear()
                optimizer.step()
                optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    "left_out", [(), (0,), (1,), (2,), (0, 1), (1, 2), (2, 3), (3, 4, 5), (0, 2, 5)], ids=lambda left: f"without{left}"
)
def test_the_mean_over_what_was_computed(left_out):
    found = steps(left_out)
    assert sum(len(seen) for _, seen in found) == 12 - len(left_out)
    for gradient, seen in found:
        assert gradient == pytest.approx(sum(seen) / len(seen))


def test_a_pass_that_was_left_inside_a_group():
    found = steps((), stop=4)
    for gradient, seen in found:
        assert gradient == pytest.approx(sum(seen) / len(seen))


def test_two_processes():
    (first, second) = run(steps, 2, (0,), 24)
    for (gradient, one), (same, other) in zip(first, second, strict=True):
        assert gradient == same == pytest.approx(sum(one + other) / len(one + other))


def test_a_validation_between_two_contexts_for_one_batch():
    """Which reads batches of its own: the training batch counts once all the same."""
    accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1, bias=False)
    rows = torch.arange(1.0, 5)[:, None]
    model, loader, validation = accelerator.prepare(model, DataLoader(rows, batch_size=1), DataLoader(rows, 2))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
        list(validation)
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
    assert model.weight.grad.item() == 2 * (1.5 + 3.5)
