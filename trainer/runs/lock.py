"""One job per run folder: a lock that ends when the job that holds it does, however it does."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
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
"""Seconds between two signs of life, where the system keeps no locks."""
SILENCE = 120.0
"""Seconds without one after which a holder on another machine counts as gone; clocks may differ by this less a beat."""

_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL}


@dataclass(frozen=True)
class Holder:
    """Who holds a lock.

    Attributes:
        host: Its machine.
        pid: Its process.
        since: When it took the lock, in seconds since 1970.
        place: The machine since it was started, and its space of process ids: a container has one of its own.
        began: When the system started the process, which tells it from a later one of the same number.
        token: No two are alike.
        by: ``"system"`` for a lock that the system keeps, ``"beat"`` for one that lives by signs of life.
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
        """This process."""
        pid = os.getpid()
        began = "" if sys.platform == "win32" else read_start_time(pid) or ""
        return cls(socket.gethostname(), pid, time.time(), _describe_place(), began, uuid.uuid4().hex, by)

    def is_alive(self, file: AnyPath) -> bool:
        """Whether it goes on, as far as can be told from here: exactly in its own place, elsewhere by its signs."""
        if self.place == _describe_place() and sys.platform != "win32":  # which has no harmless way to ask
            return read_start_time(self.pid) in ("", self.began)
        if self.by == "system":
            return True  # it gives no signs, and this machine does not see its lock
        try:
            return (file.age() if isinstance(file, RemotePath) else time.time() - file.stat().st_mtime) < SILENCE
        except OSError:
            return True


def holder(folder: AnyPath) -> Holder | None:
    """Who holds the lock of a folder now; None if nobody does."""
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
        os.close(descriptor)  # which lets go of it again
    return None


class RunLock:
    """The lock of a folder, held from the construction on.

    Where the file system keeps locks (`flock`; Linux carries it over NFS too) the system lets go of it with the
    process, however that ends. Elsewhere a thread gives a sign of life every `BEAT` seconds: in the same place a holder
    that is gone is known at once, from other machines after `SILENCE` seconds. A file system whose locks count on each
    machine for itself (Lustre's ``localflock``, NFS with ``local_lock``) does not keep two machines apart.

    Args:
        folder: What is locked; the lock is a file in it.

    Attributes:
        holder: What the file says of this process.

    Raises:
        ValueError: Another job holds it; the text says which.
        OSError: The file can't be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / LOCK
        self._descriptor: int | None = None
        self._ended = threading.Event()
        self.holder = Holder.from_current_process("beat" if fcntl is None else "system")
        if fcntl is None or not self._take_from_system():
            self.holder = replace(self.holder, by="beat")
            self._take_by_beat()

    def release(self) -> None:
        """Let go; nothing happens if that was done, or in a process forked since."""
        if self.holder.pid != os.getpid() or self._ended.is_set():
            return
        self._ended.set()
        with contextlib.suppress(OSError):
            if read_holder(self.file) == self.holder:
                os.truncate(self.file, 0)
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    # -- kept by the system --------------------------------------------------------------------------------------

    def _take_from_system(self) -> bool:
        """Whether the file system keeps locks."""
        # Not through a link: a folder from elsewhere could have the file of someone else emptied here.
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            for rest in range(20, -1, -1):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not rest:
                        raise make_in_use_error(self.folder, self.file, read_holder(self.file), certain=True) from None
                time.sleep(0.025)  # who only looks whether it is free holds it for a moment
            before = read_holder(self.file)
            if before is not None and before.by == "beat" and before.is_alive(self.file):
                raise make_in_use_error(self.folder, self.file, before)  # from a machine that has no locks here
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, encode_holder(self.holder), 0)
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

        # A forked data worker has the descriptor too, and would hold the lock on when this process is killed.
        os.register_at_fork(after_in_child=let_go)
        return True

    # -- kept by signs of life -----------------------------------------------------------------------------------

    def _take_by_beat(self) -> None:
        part = self.folder / f".{LOCK}-{self.holder.token}"
        part.write_bytes(encode_holder(self.holder))
        try:
            try:
                os.link(part, self.file)  # fails if it is there, and is never seen half-written
            except FileExistsError:
                self._take_over(part)
        finally:
            part.unlink(missing_ok=True)
        threading.Thread(target=self._beat, name="treadle-run-lock", daemon=True).start()

    def _take_over(self, part: Path) -> None:
        """Put ``part`` in the place of a lock that nobody holds. Of several jobs that try, one succeeds."""
        before = read_holder(self.file)
        if before is not None and before.is_alive(self.file):
            raise make_in_use_error(self.folder, self.file, before)
        mark = self.folder / f".{LOCK}-after-{before.token if before is not None else 'release'}"
        try:
            os.mkdir(mark)
        except FileExistsError:
            raise ValueError(
                f"{self.folder}: another job is taking it over just now; if there is none, delete {mark}."
            ) from None
        try:
            if (latest := read_holder(self.file)) != before:
                raise make_in_use_error(self.folder, self.file, latest)  # someone was faster
            os.replace(part, self.file)
        finally:
            os.rmdir(mark)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(self.file)


def make_in_use_error(folder: AnyPath, file: AnyPath, occupant: Holder | None, certain: bool = False) -> ValueError:
    """Return the error; where that process may be gone for all that is known here, with what helps."""
    occupant_text = "another job" if occupant is None else str(occupant)
    hint = ""
    if not certain and occupant is not None and occupant.place != _describe_place():
        hint = f" If that process is gone, which can't be seen from here, delete {file}."
    return ValueError(f"{folder} is in use by {occupant_text}. Wait for it, or begin a new run.{hint}")


def encode_holder(holder: Holder) -> bytes:
    """Return the content of a lock."""
    return json.dumps(asdict(holder)).encode()


def read_holder(file: AnyPath) -> Holder | None:
    """Who the file says; None if it is empty, missing or of someone else's making."""
    try:
        document = json.loads(_read_start(file))
        values = {field.name: document[field.name] for field in fields(Holder)}
        words = all(values[name].isprintable() for name in ("host", "place", "began", "by"))
        if words and values["token"].isalnum() and 0 < int(values["pid"]) < 2**31 and 0 <= values["since"] < 1e11:
            return Holder(**values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return None


def _read_start(file: AnyPath, most: int = 65536) -> bytes:
    if isinstance(file, RemotePath):
        return file.read_bytes(most)
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would make us wait for ever
    try:
        return os.read(descriptor, most)
    finally:
        os.close(descriptor)


def _describe_place() -> str:
    """This machine since it was started, and its space of process ids."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)
