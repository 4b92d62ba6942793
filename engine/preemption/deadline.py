"""Time limit that ends this process after a signal."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Collection

from ...common.messages import write_stderr
from ...strategies.processes import end_at_once

_OVER, _BY_OTHER_RANK = 0, 255  # values that are not signals
_forks_watched: list[bool] = []


class Deadline:
    """Time limit that begins with a signal, and ends the process even if its main thread hangs.

    A signal handler in Python runs only in the main thread. Therefore, the interpreter writes the number of each
    handled signal into a pipe (`signal.set_wakeup_fd`), which a thread reads. A main thread that hangs in C code and
    holds the GIL also blocks this thread.
    """

    def __init__(self, seconds: float, signals: Collection[int]) -> None:
        self._seconds, self._signals = seconds, signals
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        if not _forks_watched:  # otherwise a data worker's signals would count as this process's
            os.register_at_fork(after_in_child=_stop_waking)
            _forks_watched.append(True)
        self._previous_wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._over = threading.Event()
        self._closing = threading.RLock()  # `start` may run in another thread, or in a signal handler within `cancel`
        self._is_closed = False
        self._thread = threading.Thread(target=self._wait, name="treadle grace", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Start the time limit without a signal, because another rank has received one."""
        with self._closing, contextlib.suppress(BlockingIOError):  # full of signals, which start it
            if not self._is_closed:  # otherwise the descriptor may now belong to another file
                os.write(self._writing, bytes([_BY_OTHER_RANK]))

    def cancel(self) -> None:
        """Cancel the time limit. Must be called in the main thread."""
        signal.set_wakeup_fd(self._previous_wakeup)
        self._over.set()
        os.write(self._writing, bytes([_OVER]))
        self._thread.join()
        with self._closing:
            self._is_closed = True
            os.close(self._writing)
        os.close(self._reading)

    def _wait(self) -> None:
        first: int | None = None
        while first is None and not self._over.is_set():
            first = self._read()
        if first is None:
            return
        following = threading.Thread(target=self._follow, daemon=True)
        following.start()
        if not self._over.wait(self._seconds):
            number = signal.SIGTERM if first == _BY_OTHER_RANK or "SIGUSR" in signal.Signals(first).name else first
            write_stderr(
                f"the grace period of {self._seconds:g} s after the signal is over, so the process ends now. Resume "
                "from the latest checkpoint."
            )
            end_at_once(128 + number)
        following.join()

    def _follow(self) -> None:
        while not self._over.is_set():
            self._read()

    def _read(self) -> int | None:
        """Wait for the next byte in the pipe, and return it if it starts the time limit; else None.

        Signals are also passed on to the wakeup file descriptor that was set before.
        """
        number = os.read(self._reading, 1)[0]
        if self._previous_wakeup != -1 and number not in (_OVER, _BY_OTHER_RANK):
            with contextlib.suppress(OSError):
                os.write(self._previous_wakeup, bytes([number]))
        return number if number == _BY_OTHER_RANK or number in self._signals else None


def _stop_waking() -> None:
    """Disable the pipe of `Deadline` in a forked child process."""
    with contextlib.suppress(ValueError):  # forked by a thread other than the main thread
        signal.set_wakeup_fd(-1)
