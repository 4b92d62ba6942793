"""A fault at every point of a training, and every signal to every process: how the job ends.

`make test-faults` runs all of both matrices and prints how each job ended. The default suite runs a few cells.
"""

import dataclasses
import functools
import itertools
import sys

import pytest
from support import fault_cells
from support.fault_cells import PEERS, POINTS, SIGNALS, FaultCell, SignalCell, strike, weights

pytestmark = [pytest.mark.guarantee, pytest.mark.skipif(sys.platform != "linux", reason="/proc as on Linux")]

ACTIONS = (*fault_cells.FAILING, *fault_cells.HANGING)


def spread(strategy, launcher):
    """Each action at each point, in alternating ranks."""
    pairs = enumerate(itertools.product(POINTS, ACTIONS))  # an odd number of actions, so that ranks alternate in both
    return [FaultCell(point, action, n % 2, strategy, launcher) for n, (point, action) in pairs]


FAULTS = [
    *(FaultCell(point, action, rank) for rank, point, action in itertools.product((0, 1), POINTS, ACTIONS)),
    *spread("fsdp", "local"),
    *spread("ddp", "torchrun"),
    *spread("fsdp", "torchrun"),
    *spread("ddp", "treadle launch"),
    *(
        FaultCell(point, action, n % 2, "ddp", launcher)
        for n, (point, action, launcher) in enumerate(
            itertools.product(PEERS, fault_cells.FAILING, fault_cells.COMMANDS)
        )
    ),
]
FEW_FAULTS = {  # hanging ranks: test_hang_report.py. Whether `make test-all` alone runs it, as one of another point.
    FaultCell("teardown", "exit 0", 0): False,
    FaultCell("save", "SIGKILL", 0, "fsdp", "local"): True,
    FaultCell("save", "SIGKILL", 1, launcher="treadle launch"): False,
    FaultCell("teardown", "exit 0", 1, launcher="torchrun"): True,
    FaultCell("busy peer", "exit 3", 1): True,
    FaultCell("peer in C", "SIGKILL", 1, launcher="torchrun"): True,
}
TARGETS, MOMENTS = ("supervisor", "rank 1", "all"), ("training", "validation", "save")


def spread_signals(strategy, launcher):
    """Each signal, target and moment twice or more. A second signal to torchrun itself breaks off its wait."""
    cells = []
    for n in range(9):
        target = TARGETS[n % 3]
        times = 1 if launcher == "torchrun" and target != "rank 1" else 1 + n // 4 % 2
        cells.append(SignalCell(SIGNALS[n % 4], target, times, MOMENTS[n // 3 % 3], strategy, launcher))
    return cells


SIGNALLED = [
    *(
        SignalCell(name, target, times, point)
        for target, times, point, name in itertools.product(TARGETS, (1, 2), MOMENTS, SIGNALS)
    ),
    *spread_signals("fsdp", "local"),
    *spread_signals("ddp", "torchrun"),
    *spread_signals("fsdp", "treadle launch"),
]
FEW_SIGNALLED = {
    SignalCell("TERM", "supervisor", 2, "training"): False,
    SignalCell("USR1", "rank 1", 1, "validation", "fsdp"): True,
    SignalCell("HUP", "all", 2, "save", launcher="treadle launch"): True,
    SignalCell("INT", "all", 1, "save", "fsdp"): True,
}


def mark(cells, few):
    """The cells, and the few that the default suite and `make test-all` run; the others are marked."""
    return [
        *(pytest.param(cell, marks=pytest.mark.exhaustive if few[cell] else ()) for cell in sorted(few, key=str)),
        *(pytest.param(cell, marks=pytest.mark.faults) for cell in cells if cell not in few),
    ]


def describe(cell):
    return "-".join(str(value) for value in dataclasses.astuple(cell)).replace(" ", "_")


@functools.cache
def undisturbed(strategy, root):
    folder = root / f"undisturbed-{strategy}"
    assert strike(folder, {"strategy": strategy}, "local").status == 0
    return weights(folder)


@pytest.mark.parametrize("cell", mark(FAULTS, FEW_FAULTS), ids=describe)
def test_a_fault_ends_the_job_and_is_named(cell, tmp_path, record_property):
    outcome = strike(tmp_path, cell.plan, cell.launcher)
    patience = 3.0 if cell in FEW_FAULTS else 1.0  # the default suite keeps all cores busy
    wrong = cell.faults_of(outcome, patience)
    record_property("faults", outcome.report(cell, wrong))
    assert not wrong, outcome.err


@pytest.mark.long
@pytest.mark.parametrize("cell", mark(SIGNALLED, FEW_SIGNALLED), ids=describe)
def test_a_signal_saves_the_run_which_then_resumes(cell, tmp_path, tmp_path_factory, record_property):
    outcome = strike(tmp_path, cell.plan, cell.launcher, cell)
    resumed = strike(tmp_path, {"strategy": cell.strategy}, cell.launcher)
    same = resumed.status == 0 and weights(tmp_path) == undisturbed(cell.strategy, tmp_path_factory.getbasetemp())
    wrong = cell.faults_of(outcome, resumed, same)
    record_property("signals", outcome.report(cell, wrong))
    assert not wrong, outcome.err
