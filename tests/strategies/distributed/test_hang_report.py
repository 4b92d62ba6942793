"""A rank that hangs, or has ended, ends the run within the limit and is named."""

import re
import subprocess
import sys

import pytest
from support.fault_cells import FaultCell, strike
from support.processes import clean_environment, programs

pytestmark = [pytest.mark.guarantee, pytest.mark.skipif(sys.platform != "linux", reason="/proc as on Linux")]


@pytest.mark.faults  # seconds count, which a busy machine doesn't grant
@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (FaultCell("mid-epoch", "SIGSTOP", 1), ["is stopped by a signal (SIGSTOP)", "rank 0 waits in backward"]),
        (FaultCell("validation", "in C", 0), ["does not respond", "its main thread is at .*struck_job.py"]),
        (FaultCell("save", "lock", 0, "fsdp", "torchrun"), ["has made no progress for 2 s: in save", "optimizer step"]),
        (FaultCell("after fit", "SIGSTOP", 1), ["is stopped", "in script"]),
    ],
    ids=lambda value: value.action if isinstance(value, FaultCell) else "",
)
def test_a_rank_that_hangs_is_named_and_ends_the_run(cell, words, tmp_path):
    outcome = strike(tmp_path, {**cell.plan, "timeout": 2}, cell.launcher)
    assert outcome.seconds is not None, outcome.err
    assert 2 < outcome.seconds < 12  # 2 + 5 on a machine with a core to spare
    assert outcome.status in cell.statuses
    assert outcome.orphans == []
    line = re.search(cell.cause, outcome.err, re.MULTILINE)
    assert line is not None, outcome.err
    report = outcome.err[line.start() :]
    for word in words:
        assert re.search(word.replace("(", r"\(").replace(")", r"\)"), report), report
    (folder,) = tmp_path.glob("**/stacks-*")
    assert {file.name for file in folder.iterdir()} == {"rank-0.txt", "rank-1.txt"}
    assert "struck_job.py" in (folder / f"rank-{cell.rank}.txt").read_text()


LOST = """
import os, threading, treadle
from treadle.compat.demos.boring_classes import BoringModel

class Task(BoringModel):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1:
            os._exit(0)
        lock = threading.Lock()  # as in a collective of NCCL's, which no other rank's end ends
        lock.acquire()
        lock.acquire()

treadle.Trainer(accelerator="cpu", devices=2, limit_val_batches=0, logger=False, enable_progress_bar=False).fit(Task())
"""


def test_a_rank_that_has_gone_ends_those_that_no_error_tells(tmp_path):
    (tmp_path / "train.py").write_text(LOST)
    command = [programs() / "torchrun", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("treadle: rank 1 of 2 ended first, without a Python error") == 1
    assert re.search("treadle: rank 0 is in forward, .*train.py:11", done.stderr), done.stderr
