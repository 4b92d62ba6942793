"""Launches of several ranks that a test watches."""

import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from support.processes import clean_environment

# Ranks of most tests need no torch, so only the supervisor pays for its import.
HEAD = """
import os, signal, sys, time
rank = int(os.environ.get("RANK", -1))
def say(text):
    os.write(1, f"{text}\\n".encode())  # whole lines, also from two processes at once
if rank < 0:
    from treadle.strategies.launch import supervisor
    print("supervisor", os.getpid(), flush=True)
    supervisor.relaunch(2, **{options})
"""


SAY_PID = 'say(f"rank {rank} {os.getpid()}")\n'


class Start:
    """Starts scripts which relaunch themselves in two ranks that run `body`; their streams go to files beside them."""

    def __init__(self):
        self.started = []

    def __call__(self, folder, body, *args, options="{}", flags=(), omit="", program=sys.executable):
        folder.mkdir(exist_ok=True)
        (folder / "tmp").mkdir()
        path = folder / "train.py"
        path.write_text(HEAD.replace("{options}", options) + textwrap.dedent(body))
        env = clean_environment({"TMPDIR": str(folder / "tmp")})
        env.pop(omit, None)
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            self.started.append(subprocess.Popen([program, *flags, path, *args], env=env, stdout=out, stderr=err))
        return self.started[-1]


def pids(folder):
    """The ids of both ranks, once both have told them."""
    wait_for(lambda: len(re.findall(r"^rank \d", (folder / "out").read_text(), re.MULTILINE)) == 2, 60)
    time.sleep(0.5)  # a signal that comes while torch's agent still starts its threads is given torch's own 30 s (2.13)
    return [int(pid) for pid in re.findall(r"^rank \d (\d+)", (folder / "out").read_text(), re.MULTILINE)]


def gone(pid):
    """Whether a process has ended; it may still wait to be collected by whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition, seconds, told=str):
    """Wait until something holds; too late is an error with what was ``told`` by then."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s\n{told()}"
        time.sleep(0.02)


WHOLE = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
"""Environment of a rank as torchrun sets it."""
