"""Termination of a process from one of its threads, regardless of the state of the main thread."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from . import scratch


def end_at_once(status: int) -> None:
    """End this process and its `multiprocessing` children, such as data workers, within seconds, from any thread."""
    for child in multiprocessing.active_children():  # data workers
        child.kill()
    run_briefly(sys.stdout.flush)
    run_briefly(scratch.leave)
    os._exit(status)


def run_briefly(work: Callable[[], Any]) -> None:
    """Run a function in a thread and wait at most 0.5 s, because a lock of the main thread or a disk may block it."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(0.5)
