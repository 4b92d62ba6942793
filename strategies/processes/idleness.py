"""Detection of a process that only waits, and neither computes nor transfers much data."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

_MOST_WORK = 0.03  # CPU seconds per second; receiving 100 MB/s needs more


class Idleness:
    """Timer that measures how long this process has been idle.

    A process is idle if it uses little CPU time and, when measured, none of its threads except the measuring one is
    running, ready to run, or waiting for a disk. By CPU time alone, a process that gets no CPU on a busy machine would
    also count as idle.
    """

    def __init__(self) -> None:
        self._since = self._looked = time.monotonic()
        self._used = time.process_time()

    def measure(self) -> float:
        """Return the number of seconds for which the process has been idle, up to this measurement."""
        now, used = time.monotonic(), time.process_time()
        if used - self._used > _MOST_WORK * (now - self._looked) or _is_running():
            self._since = now
        self._looked, self._used = now, used
        return now - self._since


def _is_running() -> bool:
    """Return whether a thread other than this one runs, is ready to run, or waits for a disk."""
    own_thread = str(threading.get_native_id())
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError, IndexError):  # the thread has just ended
            if (
                task.name != own_thread
                and (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "RD"
            ):
                return True
    return False
