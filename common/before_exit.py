"""Functions to call before the interpreter exits, while threads and executors still accept work."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401, its own hook is registered first, and so called after ours
import sys
import threading
from collections.abc import Callable
from typing import Any

_waiting: dict[int, Callable[[], Any]] = {}


def before_exit(work: Callable[[], Any]) -> Callable[[], None]:
    """Register a function to call when the main thread has ended, while threads and executors still accept work.

    Return a function that cancels the registration. ``atexit`` is too late: by then, asyncio, which clients of object
    stores use, can no longer resolve host names.
    """
    key = id(work)
    _waiting[key] = work
    return lambda: _waiting.pop(key, None) and None


def _run() -> None:
    while _waiting:
        _, work = _waiting.popitem()
        try:
            work()
        except Exception:  # the other functions may have data to save
            sys.excepthook(*sys.exc_info())


# Not public, but concurrent.futures itself uses it, from Python 3.9 on.
getattr(threading, "_register_atexit", atexit.register)(_run)
