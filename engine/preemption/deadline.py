"""Deadline that ends this process some time after a signal, regardless of the state of its main thread."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Collection

from ...strategies.processes import end_at_once

_OVER, _HEARD = 0, 255  # values that are not signals
_forks_watched: list[bool] = []


class Deadline:
    """Time limit that begins with a signal. Python's own handlers wait for the main thread, which may hang.

    The interpreter writes each signal that has a handler into a pipe immediately (`signal.set_wakeup_fd`), and a thread
    reads it. The signal is passed on to any other reader, such as asyncio.

    Args:
        seconds: Time from the first signal to the end.
        signals: The signals that count.
    """

    def __init__(self, seconds: float, signals: Collection[int]) -> None:
        self._seconds, self._signals = seconds, signals
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        if not _forks_watched:  # otherwise a data worker's signals would count as this process's
            os.register_at_fork(after_in_child=_stop_waking)
            _forks_watched.append(True)
        self._others = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="treadle grace", daemon=True)
        self._thread.start()

    def hear(self) -> None:
        """Start the time limit, because another rank has received a signal."""
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._writing, bytes([_HEARD]))

    def cancel(self) -> None:
        """Cancel the time limit, because the run has ended in time. Call it in the main thread."""
        signal.set_wakeup_fd(self._others)
        self._over.set()
        os.write(self._writing, bytes([_OVER]))
        self._thread.join()
        os.close(self._reading)
        os.close(self._writing)

    def _wait(self) -> None:
        first: int | None = None
        while first is None and not self._over.is_set():
            first = self._read()
        if first is None:
            return
        following = threading.Thread(target=self._follow, daemon=True)
        following.start()
        if not self._over.wait(self._seconds):
            number = signal.SIGTERM if first == _HEARD or first == getattr(signal, "SIGUSR1", None) else first
            text = (
                f"grace={self._seconds:g} s have passed since the signal, so the process ends now. Resume from the "
                "latest checkpoint."
            )
            with contextlib.suppress(OSError):
                os.write(2, f"treadle: {text}\n".encode())
            end_at_once(128 + number)
        following.join()

    def _follow(self) -> None:
        while not self._over.is_set():
            self._read()

    def _read(self) -> int | None:
        """Read the next signal. Return it if it counts, else None."""
        number = os.read(self._reading, 1)[0]
        if self._others != -1 and number not in (_OVER, _HEARD):
            with contextlib.suppress(OSError):
                os.write(self._others, bytes([number]))
        return number if number == _HEARD or number in self._signals else None


def _stop_waking() -> None:
    """Disable the pipe in a child that was just forked, whose signals do not concern its parent."""
    with contextlib.suppress(ValueError):  # forked by a thread other than the main thread
        signal.set_wakeup_fd(-1)
