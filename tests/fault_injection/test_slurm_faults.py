"""Faults in ranks that srun has started, which ends none of them itself here. `make test-slurm` runs this."""

import dataclasses
import tempfile
from pathlib import Path

import pytest
from support.cluster import Cluster, obstacle
from support.fault_cells import PEERS, FaultCell, strike

pytestmark = [
    pytest.mark.guarantee,
    pytest.mark.slurm,
    pytest.mark.skipif(obstacle() is not None, reason=str(obstacle())),
]
FAULTS = [
    FaultCell("mid-epoch", "raise", 1),
    FaultCell("setup", "exit 0", 0),
    FaultCell("validation", "exit 3", 1),
    FaultCell("save", "SIGKILL", 0),
    FaultCell("teardown", "SIGSEGV", 1),
    FaultCell("first step", "SIGSTOP", 0),
    FaultCell("mid-epoch", "sleep", 1),
    FaultCell("save", "lock", 0, "fsdp"),
    FaultCell("validation", "in C", 1),
    *(FaultCell(point, action, 1) for point in PEERS for action in ("raise", "exit 0", "SIGKILL")),
]


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, Cluster(Path(folder)) as made:
        yield made


@pytest.mark.parametrize("cell", FAULTS, ids=lambda cell: f"{cell.point}-{cell.action}-{cell.rank}".replace(" ", "_"))
def test_a_fault_ends_the_job_and_is_named(cluster, tmp_path, record_property, cell):
    cell = dataclasses.replace(cell, launcher="srun")
    outcome = strike(tmp_path, cell.plan, "srun", variables={**cluster.env, "MASTER_ADDR": "127.0.0.1"})
    wrong = cell.faults_of(outcome)
    record_property("faults", outcome.report(cell, wrong))
    assert not wrong, outcome.err
