"""Lock on a run folder for one job, which becomes free after the job has ended for any reason."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import sys
import threading
import time
import uuid
import weakref
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from ...common.remote_path import AnyPath, RemotePath
from ...strategies.processes import read_start_time
from .file_names import LOCK

BEAT = 10.0
"""Seconds between two heartbeats, if the file system has no locks."""
SILENCE = 120.0
"""Seconds without a heartbeat after which a holder on another machine counts as dead.

The clocks of two machines may differ by at most this value minus `BEAT`.
"""

_SETTLING = 1.0  # seconds in which a concurrent takeover in a store has written its holder
_MOST_BYTES = 65536  # of a lock file
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL}


@dataclass(frozen=True)
class Holder:
    """Process that holds the lock on a run folder, as recorded in the lock file.

    Attributes:
        since: Time at which the process took the lock, in seconds since 1970.
        place: Hostname and, if known, boot ID and PID namespace.
        began: Start time of the process, which distinguishes it from a later process with the same PID; "" if unknown.
        token: Random ID of this lock.
        by: ``"system"`` for a file system lock, ``"beat"`` for a lock that heartbeats keep alive.
    """

    host: str
    pid: int
    since: float
    place: str
    began: str
    token: str
    by: str

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"

    @classmethod
    def from_current_process(cls, by: str) -> Holder:
        """Create a holder that describes the current process; ``by`` is the kind of lock."""
        pid = os.getpid()
        began = "" if sys.platform == "win32" else read_start_time(pid) or ""
        return cls(socket.gethostname(), pid, time.time(), _describe_place(), began, uuid.uuid4().hex, by)

    def is_alive(self, file: AnyPath) -> bool:
        """Return whether the process is alive.

        A process that cannot be checked, such as one on another machine, counts as alive unless its last heartbeat is
        known to be older than `SILENCE` seconds. ``file`` is the lock file.
        """
        if self.place == _describe_place() and sys.platform != "win32":  # Windows has no harmless check
            return read_start_time(self.pid) in ("", self.began)
        if self.by == "system":
            return True  # it has no heartbeat, and its lock is not visible from this machine
        try:
            return (file.age() if isinstance(file, RemotePath) else time.time() - file.stat().st_mtime) < SILENCE
        except OSError:
            return True


def holder(folder: AnyPath) -> Holder | None:
    """Return the current holder of a folder's lock; None if it is free."""
    file = folder / LOCK
    occupant = read_holder(file)
    if occupant is None or occupant.by == "beat" or fcntl is None or isinstance(file, RemotePath):
        return occupant if occupant is not None and occupant.is_alive(file) else None
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return occupant if occupant.is_alive(file) else None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return occupant
    except OSError:
        return occupant if occupant.is_alive(file) else None
    finally:
        os.close(descriptor)  # closing releases the shared lock
    return None


class RunLock:
    """Lock on a run folder, acquired when the object is created.

    If the file system has locks (`flock`; Linux supports it over NFS too), the system releases the lock when the
    process ends, for any reason. Otherwise, and in an object store, a thread updates the file every `BEAT` seconds, and
    a dead holder is detected after about `SILENCE` seconds at the latest. A file system whose locks are valid on one
    machine only (Lustre's ``localflock``, NFS with ``local_lock``) does not protect against jobs on other machines.

    A store lets only one job create an object, so two jobs never get the lock of a new run at the same time. A takeover
    from a dead job is not atomic there: a job overwrites the object, waits a second, and checks that the object is
    still its own.

    Attributes:
        holder: This process, as written to the file.

    Raises:
        ValueError: If another job holds the lock or is taking it over.
        OSError: If the file cannot be written.
    """

    def __init__(self, folder: AnyPath) -> None:
        self.folder = folder
        self.file = folder / LOCK
        self._descriptor: int | None = None
        self._ended = threading.Event()
        self.holder = Holder.from_current_process("beat" if fcntl is None else "system")
        if fcntl is None or isinstance(self.file, RemotePath) or not self._take_from_system(self.file):
            self.holder = replace(self.holder, by="beat")
            self._take_by_beat()

    def release(self) -> None:
        """Release the lock. Do nothing if it is already released, or in a forked process."""
        if self.holder.pid != os.getpid() or self._ended.is_set():
            return
        self._ended.set()
        with contextlib.suppress(OSError):
            if read_holder(self.file) == self.holder:
                if isinstance(self.file, RemotePath):
                    self.file.unlink()
                else:  # others may hold a descriptor of the file, so it must stay
                    os.truncate(self.file, 0)
        self._close()

    def _encode_holder(self) -> bytes:
        return json.dumps(asdict(self.holder)).encode()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    # -- locks of the system -------------------------------------------------------------------------------------

    def _take_from_system(self, file: Path) -> bool:
        """Acquire the lock with ``flock``. Return False if the file system does not support it."""
        # Not through a link: a foreign folder could make this truncate another file.
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            for retries in range(20, -1, -1):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not retries:
                        raise make_in_use_error(self.folder, file, read_holder(file), certain=True) from None
                time.sleep(0.025)  # a process that checks the lock holds it for a moment
            holder = read_holder(file)
            if holder is not None and holder.by == "beat" and holder.is_alive(file):
                raise make_in_use_error(self.folder, file, holder)  # the holder is on a machine without such locks
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, self._encode_holder(), 0)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                return False
            raise
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        this = weakref.ref(self)

        def let_go() -> None:
            if (lock := this()) is not None:
                lock._close()

        # A forked data worker inherits the descriptor and would keep the lock after this process is killed.
        os.register_at_fork(after_in_child=let_go)
        return True

    # -- locks with a heartbeat ----------------------------------------------------------------------------------

    def _take_by_beat(self) -> None:
        try:
            self._write(exclusive=True)
        except FileExistsError:
            holder = read_holder(self.file)
            if holder is not None and holder.is_alive(self.file):
                raise make_in_use_error(self.folder, self.file, holder) from None
            self._take_over(holder)
        threading.Thread(target=self._beat, name="treadle-run-lock", daemon=True).start()

    def _write(self, exclusive: bool = False) -> None:
        """Write the holder to the file; if ``exclusive``, raise FileExistsError if the file exists."""
        if isinstance(self.file, RemotePath):
            self.file.write_bytes(self._encode_holder(), exclusive=exclusive)
            return
        part = self.file.with_name(f".{LOCK}-{self.holder.token}")
        part.write_bytes(self._encode_holder())
        try:
            (os.link if exclusive else os.replace)(part, self.file)  # never visible half-written
        finally:
            part.unlink(missing_ok=True)

    def _take_over(self, holder: Holder | None) -> None:
        """Replace the file of a dead holder. If several jobs try, at most one succeeds."""
        if isinstance(self.file, RemotePath):
            self._write()
            time.sleep(_SETTLING)
            if (latest := read_holder(self.file)) != self.holder:
                raise make_in_use_error(self.folder, self.file, latest)
            return
        mark = self.file.with_name(f".{LOCK}-after-{holder.token if holder is not None else 'release'}")
        try:
            os.mkdir(mark)
        except FileExistsError:
            raise ValueError(
                f"{self.folder} is being taken over by another job. If no other job is running, delete {mark}."
            ) from None
        try:
            if (latest := read_holder(self.file)) != holder:
                raise make_in_use_error(self.folder, self.file, latest)  # another job was faster
            self._write()
        finally:
            os.rmdir(mark)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            with contextlib.suppress(OSError):
                if isinstance(self.file, RemotePath):
                    self._write()
                else:
                    os.utime(self.file)


def make_in_use_error(folder: AnyPath, file: AnyPath, occupant: Holder | None, certain: bool = False) -> ValueError:
    """Return the error for a folder in use, with advice if its holder may be dead."""
    occupant_text = "another job" if occupant is None else str(occupant)
    hint = ""
    if not certain and occupant is not None and occupant.place != _describe_place():
        hint = f" If that process has ended, which cannot be checked from this machine, delete {file}."
    return ValueError(f"{folder} is in use by {occupant_text}. Wait until that job ends, or start a new run.{hint}")


def read_holder(file: AnyPath) -> Holder | None:
    """Return the holder in a lock file; None if the file is empty, missing, unreadable or not a lock file."""
    try:
        document = json.loads(read_start(file, _MOST_BYTES))
        values = {field.name: document[field.name] for field in fields(Holder)}
        words = all(values[name].isprintable() for name in ("host", "place", "began", "by"))
        if words and values["token"].isalnum() and 0 < int(values["pid"]) < 2**31 and 0 <= values["since"] < 1e11:
            return Holder(**values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return None


def read_start(file: AnyPath, most: int) -> bytes:
    """Return the first ``most`` bytes of a local file, or a whole object from a store, which must not be larger."""
    if isinstance(file, RemotePath):
        return file.read_bytes(most)
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # opening a pipe would block
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return os.read(descriptor, most)
    finally:
        os.close(descriptor)


def _describe_place() -> str:
    """Return the hostname and, if known, the machine's boot ID and the PID namespace as one text."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)
