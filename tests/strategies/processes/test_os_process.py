"""Processes that end with their parent."""

from __future__ import annotations

import signal
import sys
import textwrap

import pytest
from support.processes import script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc as on Linux")


def test_rank_that_comes_after_its_supervisor_died_dies_at_once() -> None:
    source = """
    import os, subprocess, sys, time
    from treadle.strategies.processes import die_with_parent
    die_with_parent(os.getppid())
    die_with_parent(1)  # alive, and not the parent: a program started by a rank is left alone
    print("alive", flush=True)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    die_with_parent(dead.pid)
    time.sleep(60)
    """
    done = script(textwrap.dedent(source), timeout=30)
    assert (done.stdout, done.returncode) == ("alive\n", -signal.SIGKILL)
