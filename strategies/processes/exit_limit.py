"""Immediate end of a process from any thread, and a time limit for the end of a process after its script.

Thread joins and ``atexit`` handlers could otherwise block that end forever. An example is a logger's client that waits
in an ``atexit`` handler for a server that no longer answers. The watchdog cannot help: it observes the training, and
stops in an ``atexit`` handler of its own, before handlers that were registered earlier.

The limit counts from the end of the script, not from the last change of a stack, because a client that retries forever
does change its stack. Only a thread that runs Treadle's code, such as an asynchronous save, extends it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from ...common.messages import write_stderr
from . import os_process

_PACKAGE = __name__.partition(".")[0]
_STATUS = 124  # the exit status of timeout(1), as for a rank that hangs
# Seconds after which the kernel ends a process whose interpreter can no longer run threads.
_MARGIN = 2.0
_POLL = 0.1  # seconds


def end_at_once(status: int) -> None:
    """End this process and its `multiprocessing` children, such as data workers, within seconds, from any thread."""
    for child in multiprocessing.active_children():  # data workers
        child.kill()
    run_briefly(sys.stdout.flush)
    run_briefly(os_process.remove_files)
    os._exit(status)


def run_briefly(work: Callable[[], Any]) -> None:
    """Run a function in a thread and wait at most 0.5 s, because a lock of the main thread or a disk may block it."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(0.5)


class _ExitLimit:
    """Limit of this process. Its thread waits for the end of the script.

    Attributes:
        pid: The process whose end is limited.
        seconds: The limit.
        since: Time from which the limit counts after the end of the script.
    """

    def __init__(self, seconds: float, title: str) -> None:
        self.pid = os.getpid()
        self.seconds, self.title = seconds, title
        self.since = 0.0
        threading.Thread(target=self._run, name="treadle exit limit", daemon=True).start()

    def _run(self) -> None:
        threading.main_thread().join()  # it counts as ended before other threads are joined
        self.since = time.monotonic()
        seen: list[Any] = []
        while (rest := self.since + self.seconds - time.monotonic()) > 0:
            _set_alarm(rest + _MARGIN)
            time.sleep(min(_POLL, rest))
            position = [(id(frame.f_code), frame.f_lasti) for frame in _collect_own_frames()]
            if position != seen:
                seen, self.since = position, time.monotonic()
        names = {thread.ident: thread.name for thread in threading.enumerate() if not thread.daemon}
        names[threading.main_thread().ident] = "the main thread"
        stacks = "".join(f"{name}:\n{format_stack(ident)}" for ident, name in names.items())
        write_stderr(
            f"{self.title} has not ended within {self.seconds:g} s after its script, so it is ended.\n{stacks}"
        )
        end_at_once(1 if hasattr(sys, "last_value") else _STATUS)  # an uncaught error has been printed


_limits: list[_ExitLimit] = []


def limit_exit(seconds: float, title: str) -> None:
    """Limit the time from the end of the script to the end of this process. A second call replaces the limit.

    ``title`` names the process in the message, such as ``"rank 1 of 2"``.
    """
    if _limits and _limits[0].pid == os.getpid():
        _limits[0].seconds, _limits[0].title = seconds, title
    else:
        _limits[:] = [_ExitLimit(seconds, title)]


def postpone_exit_limit() -> None:
    """Let the limit count from now, because this process waits for other ranks."""
    for limit in _limits:
        limit.since = time.monotonic()


def _collect_own_frames() -> list[FrameType]:
    """Return the frames of Treadle's threads that the interpreter waits for."""
    waited = {thread.ident for thread in threading.enumerate() if not thread.daemon} - {threading.main_thread().ident}
    stacks = map(collect_frames, waited)
    return [frame for stack in stacks if any(map(_is_own, stack)) for frame in stack]


_walking = threading.RLock()
# A fork waits for the end of a walk, so that the child does collect its garbage.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_walking.acquire, after_in_parent=_walking.release, after_in_child=_walking.release)


def collect_frames(ident: int | None) -> list[FrameType]:
    """Return the frames of a thread, innermost first, or an empty list if the thread has ended.

    Python 3.11 may collect garbage in ``frame.f_back``. A finalizer then lets the thread run, which may return from the
    very frame that is being read: a segmentation fault, seen once in a run of 780 tests.
    """
    with _walking:
        thresholds = gc.get_threshold()
        gc.set_threshold(0)  # unlike gc.disable, it undoes no gc.disable of the training thread
        try:
            frame = sys._current_frames().get(ident or 0)
            return [] if frame is None else [each for each, _ in traceback.walk_stack(frame)]
        finally:
            gc.set_threshold(*thresholds)


def format_stack(ident: int | None) -> str:
    """Return the stack of a thread as Python prints it."""
    frames = collect_frames(ident)
    return "".join(traceback.format_stack(frames[0])) if frames else ""


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE


def _set_alarm(seconds: float) -> None:
    """Let the kernel end this process after a time, which no state of the interpreter can prevent.

    Does nothing if the script or a library uses this signal.
    """
    if hasattr(signal, "SIGALRM") and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        signal.setitimer(signal.ITIMER_REAL, seconds)
