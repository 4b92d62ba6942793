"""The operating system's side of a rank: whether a process lives, and dying with the supervisor."""

from __future__ import annotations

import os
import signal
import sys


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def die_with_parent(supervisor_pid: int) -> None:
    """Makes the system kill this rank when its supervisor dies, however that dies. Does nothing off Linux.

    The signal is SIGKILL: a supervisor that was itself killed can no longer end a rank which ignores or never gets to
    handle a gentler one, and a checkpoint cut short is never published. A process that is not the supervisor's own
    child, such as a program started by a rank, inherits the variables but is left alone.

    Args:
        supervisor_pid: The supervisor's process id, as handed down in `TREADLE_SUPERVISOR`.
    """
    if sys.platform != "linux":
        return
    import ctypes

    set_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if os.getppid() == supervisor_pid:
        prctl(set_death_signal, signal.SIGKILL)
    # The supervisor may have died before that call took effect, or before this process got here at all.
    if os.getppid() != supervisor_pid and not is_alive(supervisor_pid):
        os.kill(os.getpid(), signal.SIGKILL)
