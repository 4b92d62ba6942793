"""A rank that hangs ends the run within the limit and is named; one that works, however long, is left alone."""

import os
import re
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
from support.fault_cells import FaultCell, strike
from support.processes import clean_environment, programs, run
from torch.distributed import HashStore
from treadle.strategies.distributed.training_clock import describe_phase
from treadle.strategies.distributed.watchdog import Watchdog, dismiss, watch
from treadle.strategies.distributed.world import World

import treadle

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


def test_without_a_limit_one_process_has_no_watchdog():
    assert treadle.Accelerator(cpu=True).watchdog is None


def slow_alone():
    """Return the phase after the ranks have worked alone, and then exchanged, for twice the limit each."""
    accelerator = treadle.Accelerator(cpu=True)
    assert accelerator.watchdog is not None
    assert not accelerator.watchdog.clock.strict
    accelerator.gather(torch.ones(1))  # the first one connects the ranks, which takes its time on a busy machine
    accelerator.watchdog.clock.limit = 4  # more than one rank may be behind the other on a busy machine
    time.sleep(5)  # nobody waits
    for _ in range(50):  # exchanges are progress; the ranks make as many, whatever the clock of each says
        accelerator.gather(torch.ones(1))
        time.sleep(0.1)
    return describe_phase(accelerator.watchdog.clock.collect_frames())


@pytest.mark.long
def test_by_default_only_those_that_wait_for_others_are_held_to_the_limit():
    assert run(slow_alone, 2) == ["script", "script"]


def test_a_watchdog_that_has_ended_holds_no_file():
    world, counts = World(), set()
    for _ in range(4):
        watch(world, 5.0)
        dismiss()
        counts.add(len(os.listdir("/proc/self/fd")))
    assert len(counts) == 1


class SlowStore(HashStore):
    """A store in which a question of the watchdog's takes until `go_on` is set."""

    def __init__(self):
        super().__init__()
        self.asked, self.go_on, self.alarms = threading.Event(), threading.Event(), 0

    def check(self, keys):
        if keys == ["alarm 0"]:
            self.asked.set()
            self.go_on.wait(10)
        return super().check(keys)

    def add(self, key, amount):
        self.alarms += key.startswith("alarm")
        return super().add(key, amount)


def test_an_end_while_the_watchdog_asks_is_no_alarm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = SlowStore()
    store.set("1 has ended", "")
    watchdog = Watchdog(types.SimpleNamespace(rank=0, size=2), 30.0, False, store)
    assert store.asked.wait(10)
    leaving = threading.Thread(target=watchdog.stop)
    leaving.start()
    assert watchdog._alarmed.wait(10)  # `stop` wakes the exchange by it
    store.go_on.set()
    leaving.join()
    assert store.alarms == 0
    assert list(tmp_path.iterdir()) == []


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
