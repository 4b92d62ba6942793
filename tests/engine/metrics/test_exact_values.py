"""Sums of logged values that do not depend on their order or on the process that logged them."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from treadle.engine.metrics import ExactMetrics
from treadle.strategies import World

VALUES = [random.Random(n).uniform(-1, 1) * 10.0 ** random.Random(n).randint(-9, 9) for n in range(200)]
WEIGHTS = [random.Random(n).randint(1, 7) for n in range(200)]


def logged(order, reduction="mean", restored=None):
    """In steps of eight micro-batches; every other value is a tensor."""
    cursor = SimpleNamespace(number=0, micro=SimpleNamespace(number=0))
    metrics = ExactMetrics(cursor, training=True)
    if restored:
        metrics.load_state_dict(*restored)
    for index in order:
        cursor.micro.number = cursor.number % 8
        cursor.number += 1
        value = torch.tensor(VALUES[index], dtype=torch.float64) if index % 2 else VALUES[index]
        metrics.log("x", value, False, None, True, True, reduction, WEIGHTS[index])
    return metrics


def total(order, reduction="mean"):
    if reduction == "mean":
        return math.fsum(VALUES[n] * WEIGHTS[n] for n in order) / math.fsum(WEIGHTS[n] for n in order)
    return {"sum": math.fsum, "min": min, "max": max}[reduction](VALUES[n] for n in order)


@pytest.mark.parametrize("reduction", ["mean", "sum", "min", "max"])
def test_epoch_sums_are_exact_in_every_order(reduction):
    shuffled = random.Random(0).sample(range(200), 200)
    for order in (range(200), shuffled):
        ((_, value),) = logged(order, reduction).epoch_values(World())
        assert value == total(range(200), reduction)
    linear = 0.0
    for n in shuffled:
        linear += VALUES[n]
    assert linear != math.fsum(VALUES)


def test_a_step_covers_its_micro_batches():
    ((_, value),) = logged(range(24)).step_values(World())
    assert value == total(range(16, 24))


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_a_restored_epoch_continues_exactly(reduction):
    state = logged(range(70), reduction).state_dict(World())
    ((_, value),) = logged(range(70, 200), reduction, (state, World())).epoch_values(World())
    assert value == total(range(200), reduction)
