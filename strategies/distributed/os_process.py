"""The operating system's side of a rank: whether a process lives, what the supervisor knows of it, and its end."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import os
import shutil
import signal
import sys
import tempfile
import threading


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


def share_scratch() -> None:
    """Have multiprocessing make its sockets, which data workers use, in a folder that the supervisor removes.

    Otherwise a rank that is killed leaves a `pymp-...` folder. Does nothing in a process that no supervisor of ours
    started, or that has made its folder already.
    """
    scratch = os.environ.get("TREADLE_SCRATCH")
    config = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]  # what get_temp_dir reads
    if scratch is not None and config.get("tempdir") is None:
        os.makedirs(scratch, mode=0o700, exist_ok=True)  # by the first rank
        config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir=scratch)


def mark_stage(running: bool) -> None:
    """Tell the supervisor that a stage runs in this rank, or has ended: to leave within one is a failure.

    Writes one byte into a file of the supervisor's which has no name, see `Stages`. Does nothing elsewhere.
    """
    _write_stage(b"\1" if running else b"\0")


def mark_leaving() -> None:
    """Tell the supervisor that this rank has noted a signal, and leaves by itself. For signal handlers too."""
    _write_stage(b"\2")


def _write_stage(state: bytes) -> None:
    path, local_rank = os.environ.get("TREADLE_STAGES"), os.environ.get("LOCAL_RANK", "")
    if path is None or not local_rank.isdecimal():
        return
    with contextlib.suppress(OSError):  # a program that outlives the supervisor, or in another container
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(descriptor, state, int(local_rank))
        finally:
            os.close(descriptor)


def end_at_once(status: int) -> None:
    """End this process and its data workers; for threads, as the main thread can't be asked to.

    Args:
        status: the exit status.
    """
    flushing = threading.Thread(target=sys.stdout.flush, daemon=True)  # the main thread may hold its lock
    flushing.start()
    flushing.join(0.5)
    for child in multiprocessing.active_children():  # data workers
        child.kill()
    temporary = multiprocessing.process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)
    os._exit(status)
