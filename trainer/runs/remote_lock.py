"""Lock on a run folder in an object store for one job: an object that names the holder, rewritten during the job."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from ...common.remote_path import RemotePath
from .file_names import LOCK
from .lock import BEAT, Holder, encode_holder, make_in_use_error, read_holder

_SETTLING = 1.0  # seconds in which a concurrent takeover has written its holder


class RemoteLock:
    """Lock on a run folder in an object store, acquired when the object is created.

    A store lets only one job create an object, so two jobs never get the lock of a new run at the same time. A takeover
    from a dead job is not atomic: a job overwrites the object, waits a second, and checks that the object is still its
    own.

    Raises:
        ValueError: If another job holds the lock.
        OSError: If the store rejects the object.
    """

    def __init__(self, folder: RemotePath) -> None:
        self.folder, self._object = folder, folder / LOCK
        self.holder = Holder.from_current_process("beat")
        self._ended = threading.Event()
        try:
            self._object.write_bytes(encode_holder(self.holder), exclusive=True)
        except FileExistsError:
            before = read_holder(self._object)
            if before is not None and before.is_alive(self._object):
                raise make_in_use_error(folder, self._object, before) from None
            self._object.write_bytes(encode_holder(self.holder))
            time.sleep(_SETTLING)
            if (latest := read_holder(self._object)) != self.holder:
                raise make_in_use_error(folder, self._object, latest) from None
        threading.Thread(target=self._beat, name="treadle-run-lock", daemon=True).start()

    def release(self) -> None:
        """Release the lock. Do nothing if it is already released, or in a forked process."""
        if self.holder.pid != os.getpid() or self._ended.is_set():
            return
        self._ended.set()
        with contextlib.suppress(OSError):
            if read_holder(self._object) == self.holder:
                self._object.unlink()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            with contextlib.suppress(OSError):
                self._object.write_bytes(encode_holder(self.holder))
