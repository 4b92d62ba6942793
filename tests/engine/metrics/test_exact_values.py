"""Sums of logged values that do not depend on their order or on the process that logged them."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from treadle.engine.metrics import ExactMetrics

import treadle

VALUES = [random.Random(n).uniform(-1, 1) * 10.0 ** random.Random(n).randint(-9, 9) for n in range(200)]
WEIGHTS = [random.Random(n).randint(1, 7) for n in range(200)]


class Place:
    def __init__(self):
        self.number, self.micro = 0, SimpleNamespace(number=0)

    def advance(self, size):
        self.number += 1
        self.micro.number = (self.number - 1) % size


def logged(order, reduction="mean", size=8):
    cursor = Place()
    metrics = ExactMetrics(cursor, training=True)
    for index in order:
        cursor.advance(size)
        metrics.log(
            "x", torch.tensor(VALUES[index], dtype=torch.float64), False, None, True, True, reduction, WEIGHTS[index]
        )
    return metrics


@pytest.fixture
def world():
    return treadle.PartialState(cpu=True).world


def total(order, reduction="mean"):
    values = [VALUES[n] * WEIGHTS[n] if reduction == "mean" else VALUES[n] for n in order]
    return math.fsum(values) / (math.fsum(WEIGHTS[n] for n in order) if reduction == "mean" else 1)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_epoch_sums_are_exact_in_every_order(world, reduction):
    shuffled = random.Random(0).sample(range(200), 200)
    for order in (range(200), shuffled):
        ((_, value),) = logged(order, reduction).epoch_values(world)
        assert value == total(range(200), reduction)
    linear = 0.0
    for n in shuffled:
        linear += VALUES[n]
    assert linear != math.fsum(VALUES)


@pytest.mark.parametrize("reduction", ["min", "max"])
def test_extremes(world, reduction):
    ((_, value),) = logged(range(200), reduction).epoch_values(world)
    assert value == {"min": min, "max": max}[reduction](VALUES)


def test_a_step_covers_its_micro_batches(world):
    ((_, value),) = logged(range(24)).step_values(world)
    assert value == total(range(16, 24))


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_a_restored_epoch_continues_exactly(world, reduction):
    state = logged(range(70), reduction).state_dict(world)
    cursor = Place()
    restored = ExactMetrics(cursor, training=True)
    restored.load_state_dict(state, world)
    for index in range(70, 200):
        cursor.advance(8)
        restored.log("x", VALUES[index], False, None, True, True, reduction, WEIGHTS[index])
    ((_, value),) = restored.epoch_values(world)
    assert value == (max(VALUES) if reduction == "max" else total(range(200)))
