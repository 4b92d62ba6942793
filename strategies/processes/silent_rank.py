"""Diagnosis of a rank that waits or hangs: idleness, state, and its stack, which is written without running Python."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import threading
import time
from pathlib import Path

from .os_process import read_stat

_DUMP = getattr(signal, "SIGRTMIN", None)  # requests the stacks, without a handler in Python
_MOST_WORK = 0.03  # CPU seconds per second up to which a process is idle; receiving 100 MB/s needs more


class Dumps:
    """Anonymous file to which a signal handler writes the stack of this process's main thread.

    Attributes:
        path: Path from which other processes read the file; "" if the system does not support such files.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self.path = ""
        if _DUMP is not None and hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("treadle stacks")
            # Of the main thread only: the others keep running while they are read, which has ended a process with
            # SIGSEGV.
            faulthandler.register(_DUMP, file=self._descriptor, all_threads=False)
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None and _DUMP is not None:
            faulthandler.unregister(_DUMP)
            with contextlib.suppress(ValueError):  # not in the main thread
                # Another process may send the request without knowing that it is no longer answered.
                signal.signal(_DUMP, signal.SIG_IGN)
            os.close(self._descriptor)
            self._descriptor = None


def explain_silence(pid: int | None) -> str:
    """Describe why a process does not respond. ``pid`` is None for a process on another machine."""
    state = [] if pid is None else read_stat(f"/proc/{pid}")[1][:1]
    return {"T": "is stopped by a signal (SIGSTOP)", "t": "is stopped by a debugger"}.get(
        "".join(state), "does not respond: it is stopped, or blocked in C code that holds the interpreter"
    )


def fetch_stacks(pid: int, dumps: str, file: Path) -> str:
    """Make a process of this machine write its main thread's stack, and copy the stack into a file.

    Returns:
        Text with the current file and line of the main thread; "" if there is no stack.
    """
    if _DUMP is None or not dumps:
        return ""
    stacks = b""
    with contextlib.suppress(OSError):
        stopped = read_stat(f"/proc/{pid}")[1][:1] == ["T"]
        _signal_main_thread(pid, _DUMP)
        if stopped:
            os.kill(pid, signal.SIGCONT)
        end = time.monotonic() + 0.5
        while not (stacks := Path(dumps).read_bytes()).rstrip() and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.005 if stopped else 0.05)  # the output arrives line by line
        with contextlib.suppress(OSError):  # the process may have ended in the meantime
            stacks = Path(dumps).read_bytes()
            if stopped:
                os.kill(pid, signal.SIGSTOP)
        file.write_bytes(stacks)
    place = re.search(r'File "(.*)", line (\d+)', stacks.decode(errors="replace"))  # the innermost frame comes first
    return f"; its main thread is at {place[1]}:{place[2]}" if place else ""


def _signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to a process's main thread. With `os.kill`, Linux might choose another thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "tgkill"):  # glibc before 2.30
        os.kill(pid, number)
    elif libc.tgkill(pid, pid, number):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


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
        own_thread = str(threading.get_native_id())
        others = (task for task in Path("/proc/self/task").glob("*") if task.name != own_thread)
        works = used - self._used > _MOST_WORK * (now - self._looked)
        if works or any(read_stat(task)[1][:1] in (["R"], ["D"]) for task in others):
            self._since = now
        self._looked, self._used = now, used
        return now - self._since
