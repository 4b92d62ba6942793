"""Loader workers that live as long as their rank: they end with it, and not by signals meant for it."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable
from typing import Any


class LiveWithRank:
    """A ``worker_init_fn`` that ties the worker's life to that of its rank, and calls the user's.

    Launchers and terminals signal whole process groups. A rank that gets SIGTERM completes its step and saves, for
    which it needs its workers, and torch's end with SIGTERM; so they are a process group of their own.

    When the rank is gone they end at once: torch's own look for their parent every 5 s. A thread that waits for the
    parent's end takes no time and works on every system, and unlike Linux's death signal it doesn't fire when only
    the thread that started the worker has ended.

    Args:
        init: the user's ``worker_init_fn``, or None.
    """

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self._init = init

    def __call__(self, worker_id: int) -> None:
        """Prepare the worker; runs in it."""
        if hasattr(os, "setpgid"):
            os.setpgid(0, 0)
        rank = multiprocessing.parent_process()
        if rank is not None:
            threading.Thread(target=_end_with, args=(rank.sentinel,), name="treadle parent", daemon=True).start()
        if self._init is not None:
            self._init(worker_id)


def _end_with(sentinel: Any) -> None:
    multiprocessing.connection.wait([sentinel])
    # torch's worker may be blocked on a queue that nobody reads any more, so that it can't be asked to leave.
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
