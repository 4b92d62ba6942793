"""Functions that inspect processes of the operating system, kill a session, or end a process with its supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Return whether a process with this ID exists.

    Args:
        pid: The process ID.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def identify_host() -> str:
    """Return an identifier of this machine or of a container with its own process IDs, or "" if it is unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def read_start_time(pid: int) -> str | None:
    """Return a process's start time in clock ticks since boot; "" if it is unknown, None if the process does not run.

    Args:
        pid: The process ID.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *rest = text.rpartition(")")[2].split()
        return None if state in "ZX" else rest[18]  # an ended process waits until its parent has read its status
    except (OSError, ValueError, IndexError):
        pass
    with contextlib.suppress(OverflowError):
        return "" if is_alive(pid) else None
    return None


def kill_session(leader: int) -> None:
    """Kill the leader of a session, if it still runs, and all other processes of the session in any process group.

    On systems without ``/proc``, only the leader's process group is killed.

    Args:
        leader: Process ID of the leader.
    """
    pids = {leader} if is_alive(leader) else set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has just ended
            state, _, _, session, *_ = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(session) == leader and state not in "ZX":
                pids.add(int(entry.name))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # on systems without /proc
        os.killpg(leader, signal.SIGKILL)


def die_with_parent(supervisor_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Make the system end this process when its supervisor dies for any reason.

    Does nothing on systems other than Linux.

    For a rank, the signal is SIGKILL, because a supervisor that was itself killed can no longer end a rank that ignores
    a gentler signal or never handles it. An interrupted checkpoint is never published. A process that is not a child of
    the supervisor, such as a program started by a rank, inherits ``TREADLE_SUPERVISOR``. It is ended only if the
    supervisor no longer exists at the time of this call.

    Args:
        supervisor_pid: The supervisor's process ID, passed in ``TREADLE_SUPERVISOR``.
        number: Signal that this process receives. Default: SIGKILL.
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
