"""What the supervisor learns of its ranks: that all of them hang, which no rank is left to notice."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from support.launches import wait_for
from support.processes import clean_environment, programs

pytestmark = [pytest.mark.guarantee, pytest.mark.skipif(sys.platform != "linux", reason="SIGSTOP and /proc")]

TRAIN = """
import os, sys, time, treadle
accelerator = treadle.Accelerator(cpu=True, devices=int(sys.argv[1]), timeout={"seconds": 1}, project_dir="here")
accelerator.wait_for_everyone()
with open(f"{os.getpid()}.part", "w") as file:
    file.write(os.environ["TREADLE_SUPERVISOR"])
os.rename(f"{os.getpid()}.part", f"{os.getpid()}.pid")
for _ in range(15):
    time.sleep(0.1)
print("done", flush=True)
"""


def start(folder, ranks, *command):
    """Return the launcher's process and the ranks' process ids, once all have met."""
    (folder / "train.py").write_text(TRAIN)
    program = str(programs() / command[0])
    process = subprocess.Popen(
        [program, *command[1:], "train.py", str(ranks)],
        cwd=folder,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: len(list(folder.glob("*.pid"))) == ranks, 60)
    time.sleep(0.5)  # for a beat, which tells the directory
    return process, [int(file.stem) for file in folder.glob("*.pid")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "command"),
    [
        pytest.param(2, ("python",), id="two"),
        pytest.param(1, ("treadle", "launch", "--nproc-per-node", "1"), id="one", marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_that_are_all_stopped_end_the_job(ranks, command, tmp_path):
    process, pids = start(tmp_path, ranks, *command)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 124, err
    assert 1 < time.monotonic() - began < 11  # 1 + 5 on a machine with a core to spare
    for rank in range(ranks):
        words = rf"treadle: rank {rank} of {ranks} \(process \d+\) is stopped by a signal .* is at .*train.py:9"
        assert re.search(words, err), err
    (folder,) = tmp_path.glob("here/stacks-*")
    for rank in range(ranks):
        assert "train.py" in (folder / f"rank-{rank}.txt").read_text()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


@pytest.mark.long
def test_a_job_that_is_suspended_whole_goes_on(tmp_path):
    process, pids = start(tmp_path, 2, "treadle", "launch", "--nproc-per-node", "2")
    # The program above may be a stand-in for the supervisor.
    family = [process.pid, int((tmp_path / f"{pids[0]}.pid").read_text()), *pids]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3.5)  # longer than the limit with its margin
    for pid in reversed(family):
        os.kill(pid, signal.SIGCONT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert out.count("done") == 2
