"""A device that computes nothing and whose streams and events carry the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Event:
    """A moment in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0.0
        self.clocks: Clocks | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Now, in ``stream``; by default in the current one."""
        if stream is None:
            assert self.clocks is not None
            stream = self.clocks.current
        self.at = stream.time

    def wait(self, stream: Stream | None = None) -> None:
        """``stream`` goes on after this moment."""
        if stream is None:
            assert self.clocks is not None
            stream = self.clocks.current
        stream.wait_event(self)

    def query(self) -> bool:
        """Whether it has happened: the host never runs behind."""
        return True

    def synchronize(self) -> None:
        """Nothing: the host has no clock."""


class Stream:
    """Work in order. ``time`` is when all of it so far is done, in seconds."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.time = 0.0
        self.device = None

    def wait_stream(self, other: Stream) -> None:
        """What comes waits for what ``other`` has been given."""
        self.time = max(self.time, other.time)

    def wait_event(self, event: Event) -> None:
        """What comes waits for ``event``."""
        self.time = max(self.time, event.at)

    def record_event(self, event: Event | None = None) -> Event:
        """The moment at which all work so far is done."""
        event = Event() if event is None else event
        event.at = self.time
        return event

    def synchronize(self) -> None:
        """Nothing: the host has no clock."""


class Clocks:
    """What torch takes for the module of a device, ``torch.cuda``."""

    def __init__(self) -> None:
        self.current = self.compute = Stream()
        self._groups: dict[tuple[int, ...], float] = {}
        self.Stream = Stream

    def Event(self, *_: Any, **__: Any) -> Event:
        """A new moment, not recorded yet."""
        event = Event()
        event.clocks = self
        return event

    def current_stream(self, *_: Any) -> Stream:
        """The stream that work is given to."""
        return self.current

    def current_device(self) -> int:
        """There is one."""
        return 0

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Within it work is given to ``stream``."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def spend(self, seconds: float) -> None:
        """An operation in the current stream."""
        self.current.time += seconds

    def exchange(self, group: tuple[int, ...], seconds: float, *, wait: bool) -> float:
        """A collective, after the earlier ones of its group; returns when it ends.

        Args:
            group: ranks that take part.
            seconds: how long it takes once they are ready.
            wait: whether the current stream goes on only afterwards.
        """
        end = max(self.current.time, self._groups.get(group, 0.0)) + seconds
        self._groups[group] = end
        if wait:
            self.current.time = end
        return end
