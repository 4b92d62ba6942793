"""Clock of the training thread: how long it has made no progress, in which phase it is, and whether it waits for ranks.

The training thread is the main thread, unless a library such as Ray uses the main thread itself. It makes no progress
while its stack, the count of steps and exchanges, and the position of the run all stay the same.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, TypeVar

from ..processes import collect_frames
from .tracebacks import find_owner
from .waiting_call import is_users

_PERIOD = 1.0  # seconds; at most a fifth of the limit
_DEBUGGERS = ("bdb", "pdb")

F = TypeVar("F", bound=Callable[..., Any])


class _Progress:
    """Counts of this process, by which other ranks see whether it is ahead of them.

    Attributes:
        entered: Number of training steps and collectives that this process has entered.
        meetings: Number of completed calls of `World.meet`, and ``entered`` at the last one.
    """

    def __init__(self) -> None:
        self.entered = 0
        self.meetings = (0, 0)

    def note_meeting(self) -> None:
        """Record that a call of `World.meet` is complete."""
        self.meetings = self.meetings[0] + 1, self.entered

    def measure(self) -> list[int]:
        """Return the number of meetings, and the steps and collectives since then: larger for a rank that is ahead."""
        number, entered = self.meetings
        return [number, self.entered - entered]


progress = _Progress()

_phases: dict[CodeType, str] = {}
_loops: set[CodeType] = set()


def name_phase(phase: str, loop: bool = False) -> Callable[[F], F]:
    """Return a decorator that sets the name of the phase in which a function of Treadle runs.

    If ``loop`` is set, each hook or user function that the function calls is a separate phase.
    """

    def register(function: F) -> F:
        code = function.__code__
        _phases[code] = phase
        if loop:
            _loops.add(code)
        return function

    return register


def describe_phase(frames: Iterable[FrameType]) -> str:
    """Return the phase of a thread with these frames, outermost first; ``"script"`` outside of named phases."""
    phase, looping = "script", False
    for frame in frames:
        code = frame.f_code
        if code in _phases:
            phase = _phases[code]
        elif looping and (code.co_name.startswith("on_") or find_owner(frame) is None):
            phase = code.co_qualname
        looping = code in _loops
    return phase


def ask_weakly(owner: Any, question: Callable[[Any], Any], default: Any) -> Callable[[], Any]:
    """Return a function that asks ``owner`` a question, without keeping it alive. It returns ``default`` on failure."""
    reference = weakref.ref(owner)

    def ask() -> Any:
        living = reference()
        try:
            return default if living is None else question(living)
        except Exception:  # the main thread may be changing what is read
            return default

    return ask


class TrainingClock:
    """Clock of the training thread of one process.

    Attributes:
        limit: Seconds without progress after which the alarm is raised.
        strict: Whether the limit also applies to a rank that works alone.
        period: Seconds between two readings of the clock.
        thread: Thread that runs the training.
        since: Time of the last sign of progress.
        locate: Function that returns the position of the run as text, and a value that changes with any progress.
    """

    def __init__(self, limit: float, strict: bool, size: int) -> None:
        self.set_limit(limit, strict, size)
        self.thread = threading.current_thread()
        self.since = time.monotonic()
        self.locate: Callable[[], tuple[str, Any]] = lambda: ("", None)
        self._signature: Any = None

    def set_limit(self, limit: float, strict: bool, size: int) -> None:
        """Set the limit in seconds, and the ranks that it applies to."""
        self.limit, self.strict = limit, strict
        # One process hosts the store that all ranks report to, so more than 500 ranks report less often.
        self.period = min(_PERIOD * max(1.0, size / 500), limit / 5)

    def collect_frames(self) -> list[FrameType]:
        """Return the frames of the training thread, outermost first, or an empty list if the thread has ended."""
        return collect_frames(self.thread.ident)[::-1] if self.thread.is_alive() else []

    def read(self, frames: list[FrameType], now: float) -> float:
        """Return the seconds for which the training thread, whose frames are ``frames``, has made no progress."""
        signature = self._sign(frames)
        # A training thread at a breakpoint does not hang.
        is_debugged = any(frame.f_globals.get("__name__") in _DEBUGGERS for frame in frames)
        if signature != self._signature or not frames or is_debugged:
            self._signature, self.since = signature, now
        return now - self.since

    def has_moved(self, frames: list[FrameType]) -> bool:
        """Return whether the training thread has made progress since the last call of `read`."""
        return bool(self._sign(frames) != self._signature)

    def measure_stillness(self) -> float:
        """Return the seconds since the last sign of progress."""
        return time.monotonic() - self.since

    def _sign(self, frames: list[FrameType]) -> Any:
        stack = [(id(frame.f_code), frame.f_lasti) for frame in frames]
        return progress.entered, self.locate(), stack

    def describe(self, frames: list[FrameType] | None = None) -> str:
        """Return the phase, the position of the run, and the user's line, of these frames or of the current ones."""
        frames = self.collect_frames() if frames is None else frames
        user = next(filter(is_users, reversed(frames)), None)
        line = f"{user.f_code.co_filename}:{user.f_lineno}" if user else ""
        return ", ".join(filter(None, [f"in {describe_phase(frames)}", self.locate()[0], line]))
