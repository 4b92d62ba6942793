"""Simulated device that computes nothing. Its streams and events keep track of time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Event:
    """Simulated ``torch.cuda.Event``, which is a point in time in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0.0
        self.clocks: Clocks | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Set the event to the time at which all work in ``stream`` is complete."""
        if stream is None:
            assert self.clocks is not None
            stream = self.clocks.current
        self.at = stream.time

    def wait(self, stream: Stream | None = None) -> None:
        """Make subsequent work in ``stream`` wait for the event."""
        if stream is None:
            assert self.clocks is not None
            stream = self.clocks.current
        stream.wait_event(self)

    def query(self) -> bool:
        """Return True, because all work appears complete to the host, which has no clock."""
        return True

    def synchronize(self) -> None:
        """Do nothing."""


class Stream:
    """Simulated ``torch.cuda.Stream``. Its ``time`` is the time in seconds at which all of its work is complete."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.time = 0.0
        self.device = None

    def wait_stream(self, other: Stream) -> None:
        """Make subsequent work in this stream wait for the current work of another stream."""
        self.time = max(self.time, other.time)

    def wait_event(self, event: Event) -> None:
        """Make subsequent work in this stream wait for an event."""
        self.time = max(self.time, event.at)

    def record_event(self, event: Event | None = None) -> Event:
        """Set an event to the time at which all work in this stream is complete, and return it."""
        event = Event() if event is None else event
        event.at = self.time
        return event

    def synchronize(self) -> None:
        """Do nothing."""


class Clocks:
    """Simulated replacement for the torch module of a device, such as ``torch.cuda``."""

    def __init__(self) -> None:
        self.current = self.compute = Stream()
        self._groups: dict[tuple[int, ...], float] = {}
        self.Stream = Stream

    def Event(self, *_: Any, **__: Any) -> Event:
        """Return a new event that is not recorded yet."""
        event = Event()
        event.clocks = self
        return event

    def current_stream(self, *_: Any) -> Stream:
        """Return the current stream."""
        return self.current

    def current_device(self) -> int:
        """Return 0, the index of the only device."""
        return 0

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Return a context in which ``stream`` is the current stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def spend(self, seconds: float) -> None:
        """Add an operation of known duration to the current stream."""
        self.current.time += seconds

    def exchange(self, group: tuple[int, ...], seconds: float, *, wait: bool) -> float:
        """Add a collective, which starts after the work in the current stream and earlier collectives of ``group``.

        Return the time at which the collective ends, in seconds. If ``wait``, the current stream waits for it.
        """
        end = max(self.current.time, self._groups.get(group, 0.0)) + seconds
        self._groups[group] = end
        if wait:
            self.current.time = end
        return end
