"""Records in which the ranks of a machine report to their supervisor, and the diagnosis of a rank that is silent.

A record contains whether a stage runs, and heartbeats. The stack of a silent rank is written without running Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import signal
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from .os_process import read_stat

_VARIABLE = "TREADLE_BOARD"
_RECORD = 4096  # bytes for each rank
_IDLE, _RUNNING, _LEAVING, _EXITED = b"\0", b"\1", b"\2", b"\3"  # first byte of a record
_MARGIN = 1.5  # seconds that the ranks have to notice it themselves, because they know more
_ABSENCE = 2.0  # seconds without a check after which this process was stopped itself, or its machine suspended
_DUMP = getattr(signal, "SIGRTMIN", None)  # requests the stacks, without a handler in Python
_MOST_WORK = 0.03  # CPU seconds per second up to which a process is idle; receiving 100 MB/s needs more

# -- the rank's side -------------------------------------------------------------------------------------------------

_running: list[int] = []  # contains this process while a stage runs in it
_signaled: list[int] = []  # contains this process once it has received a signal


def mark_stage(running: bool, exiting: bool = False) -> None:
    """Report to the supervisor that a stage runs or has ended. Exiting during a stage counts as a failure.

    ``exiting`` means that ``sys.exit(0)`` has ended the stage, which is the cause if another rank fails in its stage.
    """
    _running[:] = [os.getpid()] if running else []
    if running:
        _signaled.clear()
    _write(0, _RUNNING if running else _EXITED if exiting else _IDLE)


def mark_leaving() -> None:
    """Report to the supervisor that this rank has noted a signal and is leaving because of it.

    Signal handlers may call this.
    """
    _signaled[:] = [os.getpid()]
    _write(0, _LEAVING)


def is_stage_running() -> bool:
    """Return whether a stage runs in this process."""
    return _running == [os.getpid()]


def was_signaled() -> bool:
    """Return whether this process has noted a signal since its last stage began."""
    return _signaled == [os.getpid()]


def write_beat(beat: Mapping[str, Any] | None) -> None:
    """Report to the supervisor that this rank is alive.

    ``beat`` must be serializable as JSON, and must differ in each call. None means that no more heartbeats follow. Data
    that does not fit into the record is not sent.
    """
    text = b"" if beat is None else json.dumps(beat).encode()
    if len(text) < _RECORD:
        _write(1, text.ljust(_RECORD - 1, b"\0"))


def _write(offset: int, data: bytes) -> None:
    path, local_rank = os.environ.get(_VARIABLE), os.environ.get("LOCAL_RANK", "")
    if not path or not local_rank.isdecimal():
        return
    with contextlib.suppress(OSError):  # a program that outlives the supervisor, or that runs in another container
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(descriptor, data, int(local_rank) * _RECORD + offset)
        finally:
            os.close(descriptor)


# -- a silent rank --------------------------------------------------------------------------------------------------


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


# -- the observer's side ---------------------------------------------------------------------------------------------


class Pulse:
    """Heartbeats of one rank, as another process sees them."""

    def __init__(self) -> None:
        self._latest: Any = None
        self._since = time.monotonic()

    def measure_silence(self, beat: Any) -> float:
        """Compare the rank's latest heartbeat with the previous one, and return the seconds since it last changed."""
        now = time.monotonic()
        if beat != self._latest:
            self._latest, self._since = beat, now
        return now - self._since


class RankBoard:
    """Anonymous file in which each rank of this machine has a record that outlives the rank.

    A record shows whether a stage runs (`mark_stage`) or the rank is leaving (`mark_leaving`), and contains the last
    heartbeat from the rank's watchdog, if there is one.

    Attributes:
        variables: Environment variables that the ranks need; none on systems that do not support such files.
    """

    def __init__(self, nproc: int) -> None:
        self._nproc = nproc
        self._descriptor: int | None = None
        self._pulses: dict[int, Pulse] = {}
        self._looked = 0.0
        self.variables: dict[str, str] = {}
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("treadle ranks")
            self.variables = {_VARIABLE: f"/proc/{os.getpid()}/fd/{self._descriptor}"}
            self.clear()

    def clear(self) -> None:
        """Clear all records before the ranks start or restart."""
        self._pulses.clear()
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.ftruncate(self._descriptor, self._nproc * _RECORD)

    def is_running(self, local_rank: int) -> bool:
        """Return whether a stage runs in a rank, or the rank is leaving because of a signal."""
        return self._read(local_rank)[:1] in (_RUNNING, _LEAVING)

    def has_exited(self, local_rank: int) -> bool:
        """Return whether ``sys.exit(0)`` has ended the stage of a rank."""
        return self._read(local_rank)[:1] == _EXITED

    def is_leaving(self, local_rank: int) -> bool:
        """Return whether a rank has noted a signal and is leaving because of it."""
        return self._read(local_rank)[:1] == _LEAVING

    def find_silent(self, ended: Collection[int]) -> list[int]:
        """Return the remaining ranks if each of them has been silent for longer than its limit; else [].

        As long as one rank responds, it reports the silent ranks itself. ``ended`` holds the ranks that have ended.
        """
        now = time.monotonic()
        if now - self._looked > _ABSENCE:
            self._pulses.clear()
        self._looked = now
        ranks = [rank for rank in range(self._nproc) if rank not in ended]
        silent = []
        for rank in ranks:
            record = self._read(rank)
            seconds = self._pulses.setdefault(rank, Pulse()).measure_silence(record)
            if (beat := _parse(record)) is not None and seconds > beat["limit"] + _MARGIN:
                silent.append(rank)
        return ranks if silent == ranks else []

    def report(self, local_rank: int, folder_name: str) -> str:
        """Describe why a rank is silent, and write its main thread's stack to a file in the folder ``folder_name``."""
        beat = _parse(self._read(local_rank))
        if beat is None:
            return "does not respond"
        folder = Path(beat["directory"], folder_name)
        reason = f"(process {beat['pid']}) {explain_silence(beat['pid'])}"
        place = ""
        with contextlib.suppress(OSError):  # the disk is full
            folder.mkdir(parents=True, exist_ok=True)
            place = fetch_stacks(beat["pid"], beat["dumps"], folder / f"rank-{beat['rank']}.txt")
        return f"{reason}; no other rank of this machine responds either; last seen {beat['where']}{place}"

    def _read(self, local_rank: int) -> bytes:
        return b"" if self._descriptor is None else os.pread(self._descriptor, _RECORD, local_rank * _RECORD)

    def close(self) -> None:
        """Close the file after the ranks have ended."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _parse(record: bytes) -> dict[str, Any] | None:
    """Return a rank's last heartbeat, or None if there is none or the rank is currently writing it."""
    try:
        return dict(json.loads(record[1:].rstrip(b"\0")))
    except ValueError:
        return None
