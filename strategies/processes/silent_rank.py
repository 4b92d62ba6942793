"""Diagnosis of a rank that sends no heartbeat: its state, and its stack, which is written without running Python."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import time
from pathlib import Path

_DUMP = getattr(signal, "SIGRTMIN", None)  # requests the stacks, without a handler in Python


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
    state = "" if pid is None else _read_state(pid)
    return {"T": "is stopped by a signal (SIGSTOP)", "t": "is stopped by a debugger"}.get(
        state, "does not respond: it is stopped, or blocked in C code that holds the interpreter"
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
        stopped = _read_state(pid) == "T"
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


def _read_state(pid: int) -> str:
    """Return the state letter of a process in /proc, such as "T" for stopped; "" if /proc has no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
