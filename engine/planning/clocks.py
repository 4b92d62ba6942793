"""Simulated device that computes nothing; its streams and events carry the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Event:
    """Point in time in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0.0
        self.clocks: Clocks | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Set the event to the current time of ``stream``; by default of the current stream.

        Args:
            stream: The stream.
        """
        if stream is None:
            assert self.clocks is not None
            stream = self.clocks.current
        self.at = stream.time

    def wait(self, stream: Stream | None = None) -> None:
        """Make ``stream`` wait for the event.

        Args:
            stream: The stream. Default: the current one.
        """
        if stream is None:
            assert self.clocks is not None
            stream = self.clocks.current
        stream.wait_event(self)

    def query(self) -> bool:
        """Return True: the host is never behind."""
        return True

    def synchronize(self) -> None:
        """Do nothing: the host has no clock."""


class Stream:
    """Sequence of operations. ``time`` is the time, in seconds, at which all operations so far are done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.time = 0.0
        self.device = None

    def wait_stream(self, other: Stream) -> None:
        """Make subsequent work wait for all work so far of another stream.

        Args:
            other: The other stream.
        """
        self.time = max(self.time, other.time)

    def wait_event(self, event: Event) -> None:
        """Make subsequent work wait for an event.

        Args:
            event: The event.
        """
        self.time = max(self.time, event.at)

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event at which all work so far is done.

        Args:
            event: The event to set. Default: a new one.
        """
        event = Event() if event is None else event
        event.at = self.time
        return event

    def synchronize(self) -> None:
        """Do nothing: the host has no clock."""


class Clocks:
    """Stand-in for a device's module in torch, such as ``torch.cuda``."""

    def __init__(self) -> None:
        self.current = self.compute = Stream()
        self._groups: dict[tuple[int, ...], float] = {}
        self.Stream = Stream

    def Event(self, *_: Any, **__: Any) -> Event:
        """Return a new event, not recorded yet."""
        event = Event()
        event.clocks = self
        return event

    def current_stream(self, *_: Any) -> Stream:
        """Return the current stream."""
        return self.current

    def current_device(self) -> int:
        """Return 0: there is one device."""
        return 0

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make ``stream`` the current one inside the context.

        Args:
            stream: The stream.
        """
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def spend(self, seconds: float) -> None:
        """Add an operation to the current stream.

        Args:
            seconds: Its duration.
        """
        self.current.time += seconds

    def exchange(self, group: tuple[int, ...], seconds: float, *, wait: bool) -> float:
        """Add a collective, after the earlier ones of its group.

        Args:
            group: The ranks that take part.
            seconds: Its duration once they are ready.
            wait: Whether the current stream waits for it.

        Returns:
            The time at which it ends.
        """
        end = max(self.current.time, self._groups.get(group, 0.0)) + seconds
        self._groups[group] = end
        if wait:
            self.current.time = end
        return end
