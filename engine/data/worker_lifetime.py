"""Loader workers that end with their rank."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable
from typing import Any


class EndWithRank:
    """A ``worker_init_fn`` that lets the worker end as soon as its rank is gone, and calls the user's.

    torch's workers look for their parent every 5 s. A thread that waits for the parent's end takes no time, unlike
    Linux's death signal it doesn't fire when only the thread that started the worker has ended, and it works on every
    system.

    Args:
        init: the user's ``worker_init_fn``, or None.
    """

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self._init = init

    def __call__(self, worker_id: int) -> None:
        """Prepare the worker; runs in it."""
        rank = multiprocessing.parent_process()
        if rank is not None:
            threading.Thread(target=_end_with, args=(rank.sentinel,), name="treadle parent", daemon=True).start()
        if self._init is not None:
            self._init(worker_id)


def _end_with(sentinel: Any) -> None:
    multiprocessing.connection.wait([sentinel])
    # torch's worker may be blocked on a queue that nobody reads any more, so that it can't be asked to leave.
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
