"""End a process from a thread, whatever its main thread does."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from . import scratch


def end_at_once(status: int) -> None:
    """End this process and its data workers; for threads, as the main thread can't be asked to.

    Args:
        status: the exit status.
    """
    for child in multiprocessing.active_children():  # data workers
        child.kill()
    run_briefly(sys.stdout.flush)
    run_briefly(scratch.leave)
    os._exit(status)


def run_briefly(work: Callable[[], Any]) -> None:
    """Run what may hang too: the main thread may hold a lock that it needs, or the disk does not answer."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(0.5)
