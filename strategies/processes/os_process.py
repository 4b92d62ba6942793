"""Functions that inspect or end processes of the operating system."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import socket
import sys
from functools import cache
from pathlib import Path

IDENTITY = r"[0-9a-f]{8}-\d+-\d*"
"""Pattern of the result of `identify_process`."""


def is_alive(pid: int) -> bool:
    """Return whether a process with this ID exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def identify_host() -> str:
    """Return an identifier of this machine and PID namespace, such as a container's; "" if it is unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def identify_process() -> str:
    """Return a short name of this process, which no other process has: its machine, its PID and its start time."""
    return _identify_own(os.getpid())


@cache
def _identify_own(pid: int) -> str:
    return f"{_identify_machine()}-{pid}-{'' if sys.platform == 'win32' else read_start_time(pid) or ''}"


def has_ended(identity: str) -> bool | None:
    """Return whether the process with this name from `identify_process` has ended; None for one of another machine."""
    if identity == identify_process():
        return False
    match = re.fullmatch(r"(\w+)-(\d+)-(\d*)", identity)
    if match is None or match[1] != _identify_machine() or sys.platform == "win32":  # it has no harmless check
        return None
    return read_start_time(int(match[2])) not in ("", match[3])


def _identify_machine() -> str:
    return hashlib.sha256((identify_host() or socket.gethostname()).encode()).hexdigest()[:8]


def read_start_time(pid: int) -> str | None:
    """Return a process's start time in clock ticks since boot; "" if it is unknown, None if the process has ended."""
    _, fields = read_stat(f"/proc/{pid}")
    if len(fields) > 19:  # an ended process waits until its parent has read its status
        return None if fields[0] in "ZX" else fields[19]
    with contextlib.suppress(OverflowError):
        return "" if is_alive(pid) else None
    return None


def read_stat(folder: str | Path) -> tuple[str, list[str]]:
    """Return the name of a process or thread, and the fields after it, of which the first is the state; see proc(5).

    They are empty if it has ended, or on systems without ``/proc``.

    Args:
        folder: Folder of the process or thread in ``/proc``.
    """
    try:
        text = Path(folder, "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", []
    name, _, fields = text.partition("(")[2].rpartition(")")
    return name, fields.split()


def kill_session(leader: int) -> None:
    """Kill the leader of a session, if it still runs, and all other processes of the session in any process group.

    On systems without ``/proc``, only the leader's process group is killed.
    """
    pids = {leader} if is_alive(leader) else set()
    for entry in Path("/proc").glob("[0-9]*"):
        _, fields = read_stat(entry)
        if fields and int(fields[3]) == leader and fields[0] not in "ZX":
            pids.add(int(entry.name))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # on systems without /proc
        os.killpg(leader, signal.SIGKILL)


def die_with_parent(supervisor_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Make Linux send this process a signal when its supervisor dies, if the supervisor is its parent.

    The default is SIGKILL, because a supervisor that was itself killed can no longer end a rank that ignores a gentler
    signal. A process that is not a child of the supervisor is ended only if the supervisor no longer exists at the time
    of this call.
    """
    if sys.platform != "linux":
        return
    import ctypes

    set_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if os.getppid() == supervisor_pid:
        prctl(set_death_signal, number)
    # The supervisor may have died before that call took effect, or before this process reached this line.
    if os.getppid() != supervisor_pid and not is_alive(supervisor_pid):
        os.kill(os.getpid(), number)
