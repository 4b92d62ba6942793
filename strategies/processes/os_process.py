"""Ranks as processes of the operating system: their identity, their end, and the temporary files that they leave.

Each rank has a folder in ``treadle-<user>-<namespace>`` in the system's temp folder. The folder's name contains the
process IDs of the launcher and of the rank, and the rank's start time. The folder contains multiprocessing's sockets,
which data workers use, and a link to each unfinished directory, such as that of a checkpoint being written. The last
process of a job to leave a machine also removes these directories. The last process is the supervisor or, without a
supervisor, the last rank. A later job removes the sockets only, because another job may use the same directories by
then.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing.process
import multiprocessing.util
import os
import re
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

IDENTITY = r"[0-9a-f]{8}-\d+-\d*"
"""Pattern of the result of `identify_process`."""

_NAME = re.compile(r"(\d+)-(\d+)-(\d*)(-left)?")
# A socket's path has 108 bytes with the terminating zero, 104 on macOS; multiprocessing sets its name.
_SOCKET_FOLDER_LIMIT = (107 if sys.platform == "linux" else 103) - len("/listener-12345678")
_TRIES = 20  # the previous job may remove the root at the same moment

_Identity = tuple[int, int]  # the device and inode of a directory

_unfinished: dict[Path, _Identity] = {}


# -- identity and end ----------------------------------------------------------------------------------------------


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


# -- temporary files -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """Folder of one rank."""

    path: Path
    job: int
    pid: int
    began: str
    has_left: bool

    @property
    def is_alive(self) -> bool:
        """True unless the rank is known to have ended."""
        return read_start_time(self.pid) in ("", self.began)


_opened: list[_Entry] = []
_leaving = threading.Lock()


def open_scratch(job: int) -> None:
    """Create this rank's folder, let multiprocessing use it if possible, and remove the folders that ended ranks left.

    ``job`` is the ID of the process that started the ranks of this machine. Does nothing if the folder cannot be
    created safely.
    """
    pid = os.getpid()
    if _opened and _opened[0].pid == pid:
        return
    _opened.clear()
    _unfinished.clear()  # those of the process that forked this one
    root = _find_root()
    if root is None:
        return
    sweep()
    began = read_start_time(pid) or ""
    entry = _Entry(root / f"{job}-{pid}-{began}", job, pid, began, has_left=False)
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):
            root.mkdir(mode=0o700, exist_ok=True)
            if not _is_own(root):
                return
            entry.path.mkdir(mode=0o700)
            break
    else:
        return
    _opened.append(entry)
    # If the path is too long, multiprocessing creates a folder with a shorter name itself.
    if len(os.fsencode(entry.path)) <= _SOCKET_FOLDER_LIMIT:
        config = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]  # get_temp_dir's
        config.setdefault("tempdir", str(entry.path))
    # After multiprocessing's own finalizers, which unlink the sockets, and in the way in which it removes its own
    # folder.
    multiprocessing.util.Finalize(None, _leave_at_exit, exitpriority=-100)


def note_unfinished(directory: Path) -> None:
    """Register a file or directory for removal if this job ends before `forget_unfinished` is called."""
    identity = _identify(directory)
    if identity is None or directory in _unfinished:
        return
    _unfinished[directory] = identity
    if (link := _find_link(identity)) is not None:
        with contextlib.suppress(OSError):  # the disk is full, or a second save is writing there
            link.symlink_to(directory)


def is_unfinished(directory: Path) -> bool:
    """Return whether this process has registered a directory with `note_unfinished` that exists and is incomplete."""
    return directory in _unfinished and _identify(directory) == _unfinished[directory]


def forget_unfinished(directory: Path) -> None:
    """Cancel the removal of a directory that is complete or has been removed."""
    identity = _unfinished.pop(directory, None)
    if identity is not None and (link := _find_link(identity)) is not None:
        with contextlib.suppress(OSError):
            link.unlink()


def remove_files() -> None:
    """Remove this process's folder and, if this is the last process of its job, all files that the job left.

    Unfinished directories remain until the last process leaves, because other processes may still write into them.
    """
    with _leaving:  # the main thread and a watchdog's thread may call this
        if not _opened or _opened[0].pid != os.getpid():
            for directory, identity in [] if _opened else list(_unfinished.items()):  # there is only one process
                _remove_unfinished(directory, identity)
            return
        entry = _opened[0]
        if not _unfinished:
            shutil.rmtree(entry.path, ignore_errors=True)
        else:  # other processes may still write into these directories
            with contextlib.suppress(OSError):
                entry.path.rename(f"{entry.path}-left")
        if not any(other.job == entry.job and not other.has_left and other.is_alive for other in _list_entries()):
            sweep(entry.job)
        else:
            _drop_root()
        _opened.clear()
        _unfinished.clear()


def _leave_at_exit() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the rest takes a moment and must be completed
    remove_files()


def leave_on_sigterm() -> None:
    """Install a SIGTERM handler that removes this rank's folder.

    Does nothing outside the main thread, without a folder, or if SIGTERM already has a handler. Call this only when
    this rank fails or ends, because a Python handler, unlike the system's default, has to wait for C code.
    """
    handled = threading.current_thread() is threading.main_thread()
    if handled and _opened and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end_by_signal)


def end_by_signal(number: int, frame: FrameType | None) -> None:
    """Remove this process's folder, and end the process as the signal does by default."""
    signal.signal(number, signal.SIG_IGN)
    remove_files()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def sweep(job: int | None = None, all_ended: bool = False) -> None:
    """Remove the files that ended processes have left.

    ``job`` is the ID of a job that ends on this machine; its unfinished directories are also removed. It is None when a
    job begins. With ``all_ended``, the files of all ranks of ``job`` are removed, even if a killed process has not
    exited yet.
    """
    for entry in _list_entries():
        if entry.job == job and (all_ended or entry.has_left or not entry.is_alive):
            for link in _list(entry.path):
                with contextlib.suppress(OSError, ValueError):  # it is a socket
                    device, inode = link.name.split("-")
                    _remove_unfinished(link.readlink(), (int(device), int(inode)))
            shutil.rmtree(entry.path, ignore_errors=True)
        elif not entry.is_alive:
            shutil.rmtree(entry.path, ignore_errors=True)
    _drop_root()


def _remove_unfinished(directory: Path, identity: _Identity) -> None:
    """Remove a file or directory, unless it no longer exists or another one has replaced it."""
    if _identify(directory) != identity:
        return
    if directory.is_dir():
        shutil.rmtree(directory, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            directory.unlink()


def _identify(directory: Path) -> _Identity | None:
    try:
        status = directory.lstat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode) else None


def _find_link(identity: _Identity) -> Path | None:
    if not _opened or _opened[0].pid != os.getpid():
        return None
    return _opened[0].path / "{}-{}".format(*identity)


def _find_root() -> Path | None:
    """Return the folder that contains the folders of this user's ranks; None if it cannot be used.

    The folder's name contains the PID namespace, because containers may share a temp folder.
    """
    if not hasattr(os, "getuid"):
        return None
    namespace = 0
    with contextlib.suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    root = Path(tempfile.gettempdir(), f"treadle-{os.getuid()}-{namespace:x}")
    return root if _is_own(root) else None


def _is_own(root: Path) -> bool:
    """Return whether the folder belongs to this user and no other can write to it, or it does not exist yet."""
    try:
        status = root.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _list(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder)]
    except OSError:
        return []


def _list_entries() -> Iterator[_Entry]:
    root = _find_root()
    for path in [] if root is None else _list(root):
        if (match := _NAME.fullmatch(path.name)) is not None:
            yield _Entry(path, int(match[1]), int(match[2]), match[3], has_left=match[4] is not None)


def _drop_root() -> None:
    if (root := _find_root()) is not None:
        with contextlib.suppress(OSError):  # it is in use, or already deleted
            root.rmdir()
