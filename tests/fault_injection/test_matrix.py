"""A fault at every point of a training, and every signal to every process: how the job ends.

`make test-faults` runs all of both matrices and prints them as tables. The default suite runs a spread.
"""

import dataclasses
import functools
import itertools
import sys

import pytest
from strikes import FAILING, HANGING, POINTS, SIGNALS, FaultCell, SignalCell, strike, weights

pytestmark = [pytest.mark.guarantee, pytest.mark.skipif(sys.platform != "linux", reason="/proc as on Linux")]

ACTIONS = (*FAILING, *HANGING)


def spread(strategy, launcher):
    """Each point and each action once or more, in alternating ranks."""
    pairs = ((POINTS[n % len(POINTS)], ACTIONS[n % len(ACTIONS)]) for n in range(len(POINTS) * 2 + 2))
    return [FaultCell(p, a, n % 2, strategy, launcher) for n, (p, a) in enumerate(pairs)]


FAULTS = [
    *(FaultCell(point, action, rank) for rank, point, action in itertools.product((0, 1), POINTS, ACTIONS)),
    *spread("fsdp", "local"),
    *spread("ddp", "torchrun"),
    *spread("ddp", "treadle launch"),
    *spread("fsdp", "torchrun"),
]
SIGNALLED = [
    SignalCell(name, target, times, point)
    for target, times, point, name in itertools.product(
        ("supervisor", "rank 1", "all"), (1, 2), ("training", "validation", "save"), SIGNALS
    )
]


def describe(cell):
    return "-".join(str(value) for value in dataclasses.astuple(cell)).replace(" ", "_")


@functools.cache
def undisturbed(strategy, root):
    folder = root / f"undisturbed-{strategy}"
    assert strike(folder, {"strategy": strategy}, "local").status == 0
    return weights(folder)


def summarize(outcome, wrong):
    return {"seconds": outcome.seconds, "status": outcome.status, "linger": outcome.linger, "wrong": wrong}


@pytest.mark.faults
@pytest.mark.parametrize("cell", FAULTS, ids=describe)
def test_a_fault_ends_the_job_and_is_named(cell, tmp_path, record_property):
    outcome = strike(tmp_path, cell.plan, cell.launcher)
    wrong = cell.faults_of(outcome)
    record_property("fault", (dataclasses.asdict(cell), summarize(outcome, wrong)))
    assert not wrong, outcome.err


@pytest.mark.faults
@pytest.mark.parametrize("cell", SIGNALLED, ids=describe)
def test_a_signal_saves_the_run_which_then_resumes(cell, tmp_path, tmp_path_factory, record_property):
    outcome = strike(tmp_path, cell.plan, cell.launcher, cell)
    resumed = strike(tmp_path, {"strategy": cell.strategy}, cell.launcher)
    same = resumed.status == 0 and weights(tmp_path) == undisturbed(cell.strategy, tmp_path_factory.getbasetemp())
    wrong = cell.faults_of(outcome, resumed, same)
    record_property("signal", (dataclasses.asdict(cell), summarize(outcome, wrong)))
    assert not wrong, outcome.err
