"""The first failure and a signal end all ranks."""

import re
import signal
import sys
import time

import pytest
from support.launches import SAY_PID, gone, pids, wait_for
from support.processes import python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc as on Linux")


FAILURES = {
    # torch's exit with a group left over aborts now and then ("terminate called ..."), so this rank skips it.
    "raises": ("try: raise ValueError('no such thing')\nexcept ValueError: traceback.print_exc(); os._exit(1)", 1),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", 137),
    "leaves": ("os._exit(3)", 3),
}
OTHERS = ("raises", "leaves")


IN_COLLECTIVE = """
import traceback
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if rank == 0:
    dist.barrier()
"""


STUCK_WITH_A_WORKER = """
import subprocess
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = subprocess.Popen(["sleep", "60"])
    say(f"worker {worker.pid}")
    time.sleep(60)
while "worker" not in open(sys.argv[1]).read():
    time.sleep(0.01)
"""


FAIL = 'say(f"failed at {time.time()}")\n'


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", *(pytest.param(how, marks=pytest.mark.exhaustive) for how in OTHERS)])
def test_first_failure_ends_the_others_and_gives_the_status(start, tmp_path, how):
    action, status = FAILURES[how]
    peer = IN_COLLECTIVE if how == "raises" else STUCK_WITH_A_WORKER
    process = start(tmp_path, SAY_PID + peer + FAIL + action, str(tmp_path / "out"), program=python())
    code = process.wait(60)
    ended = time.time()
    out, err = (tmp_path / "out").read_text(), (tmp_path / "err").read_text()
    assert code == status, err
    failed = re.search(r"failed at ([\d.]+)", out)
    assert ended - float(failed[1]) < 5
    report = [line for line in err.splitlines() if line.startswith("treadle:")]
    words = "killed by SIGKILL" if how == "killed" else f"exit status {status}"
    assert report[0].startswith(f"treadle: rank 1 of 2 failed first: {words}")
    assert len(report) == 2
    assert report[1].startswith("treadle: rank 0:")
    assert how == "raises" or report[1] == "treadle: rank 0: killed by SIGKILL, sent by this launcher"
    # The traceback comes once, from the rank itself; the agent's own pages are silenced.
    assert err.count("no such thing") == (2 if how == "raises" else 0)
    assert "closing signal" not in err
    assert "Root Cause" not in err
    assert all(gone(int(pid)) for pid in re.findall(r"^(?:rank \d|worker) (\d+)$", out, re.MULTILINE))
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "times", "options"),
    [
        (signal.SIGTERM, 2, "{'grace': 1.0}"),
        pytest.param(signal.SIGUSR1, 1, "{'grace': 1.0}", marks=pytest.mark.exhaustive),
        (signal.SIGINT, 2, "{}"),
    ],
)
def test_signal_goes_to_every_rank_and_sigkill_after_the_grace_or_a_second_ctrl_c(
    start, tmp_path, number, times, options
):
    body = f"""
    def leave(number, frame):
        say(f"rank {{rank}} saved on {{number}}")
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, leave if rank == 0 else signal.SIG_IGN)
    {SAY_PID.strip()}
    time.sleep(60)
    """
    process = start(tmp_path, body, options=options)
    ranks = pids(tmp_path)
    began = time.monotonic()
    for _ in range(times):
        process.send_signal(number)
        wait_for(lambda: f"rank 0 saved on {int(number)}\n" in (tmp_path / "out").read_text(), 5)
    assert process.wait(10) == 128 + (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
    assert time.monotonic() - began < 15  # the ranks sleep for 60
    assert number == signal.SIGINT or time.monotonic() - began > 1
    err = (tmp_path / "err").read_text()
    assert f"treadle: {number.name} was forwarded to 2 ranks\n" in err
    assert "treadle: rank 1: killed by SIGKILL, sent by this launcher\n" in err
    assert "Traceback" not in err
    assert all(gone(pid) for pid in ranks)
