"""Schedules by name: each factor against a formula by hand, and errors."""

import math

import pytest
import torch

from treadle.optim import lr_schedule


def read_rates(name, steps, count=None, **options):
    """Step a schedule, and return the learning rate of each optimizer step."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = lr_schedule(name, optimizer, steps, **options)
    rates = []
    for _ in range(steps if count is None else count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("constant", {}, [1.0] * 10),
        ("constant", {"warmup_steps": 4}, [0.25, 0.5, 0.75, *[1.0] * 7]),
        ("linear", {}, [1 - step / 10 for step in range(10)]),
        ("linear", {"warmup_steps": 2, "min_lr_ratio": 0.2}, [0.5, 1.0, *(1 - 0.8 * step / 8 for step in range(8))]),
        ("cosine", {"warmup_steps": 0.2}, [0.5, 1.0, *((1 + math.cos(math.pi * step / 8)) / 2 for step in range(8))]),
        ("warmup_stable_decay", {}, [*[1.0] * 9, 0.5]),
        (
            "warmup_stable_decay",
            {"warmup_steps": 2, "decay_steps": 5, "decay": "1-sqrt", "min_lr_ratio": 0.1},
            [0.5, *[1.0] * 4, *(0.1 + 0.9 * (1 - math.sqrt(step / 5)) for step in range(5))],
        ),
        (
            "warmup_stable_decay",
            {"warmup_steps": 2, "decay_steps": 4, "decay": "cosine"},
            [0.5, *[1.0] * 5, *((1 + math.cos(math.pi * step / 4)) / 2 for step in range(4))],
        ),
    ],
)
def test_rates(name, options, expected):
    assert read_rates(name, 10, **options) == pytest.approx([2.0 * factor for factor in expected], rel=1e-12)


def test_a_run_beyond_its_length_keeps_the_last_rate():
    assert read_rates("warmup_stable_decay", 10, 13, min_lr_ratio=0.25)[10:] == [0.5] * 3
    assert read_rates("constant", math.inf, 3, warmup_steps=2) == [1.0, 2.0, 2.0]
    assert read_rates("constant", 2, 2, warmup_steps=4) == [0.5, 1.0]  # a short trial of a longer run


@pytest.mark.parametrize(
    ("name", "steps", "options", "words"),
    [
        ("cosin", 10, {}, "name='cosin' is not one of .* Did you mean 'cosine'"),
        ("linear", math.inf, {}, "'linear' needs the length of the run, but steps=inf"),
        ("constant", math.inf, {"warmup_steps": 0.1}, "'constant' needs the length of the run"),
        ("warmup_stable_decay", 10, {"warmup_steps": 6, "decay_steps": 6}, "6 and decay_steps=6 must fit into the"),
        ("cosine", 10, {"warmup_steps": 11}, "warmup_steps=11 must fit into the run, steps=10. Reduce it"),
        ("cosine", 10, {"warmup_steps": math.nan}, "warmup_steps=nan must be a number"),
        ("cosine", 10, {"min_lr_ratio": 2}, "min_lr_ratio=2 must be a fraction of the peak"),
        ("warmup_stable_decay", 10, {"decay_steps": 1.5}, "decay_steps=1.5 must be a number of steps, or a fraction"),
        ("warmup_stable_decay", 10, {"decay": "sqrt"}, "decay='sqrt' is not one of"),
    ],
)
def test_errors(name, steps, options, words):
    with pytest.raises(ValueError, match=words):
        read_rates(name, steps, 1, **options)
