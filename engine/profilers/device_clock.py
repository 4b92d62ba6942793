"""Measurement of the time that a device takes for actions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

_PENDING = 4096  # marks waiting to be read; far more than a device can lag behind


class Span:
    """Interval between two marks, such as CUDA events, in a device's stream."""

    __slots__ = ("inner", "name", "outer", "repeats", "start", "stop")

    def __init__(self, name: str, start: Any, outer: Span | None) -> None:
        self.name = name
        self.start = start
        self.stop: Any = None
        self.outer = outer
        self.inner = 0.0
        while outer is not None and outer.name != name:
            outer = outer.outer
        self.repeats = outer is not None


class DeviceClock:
    """Clock that marks the beginning and end of actions in a device's stream, and reads the times later.

    The device reaches a mark when all work before it is complete. ``take`` is called for each span, in the order in
    which spans end. Its arguments are the name, the duration in seconds (0 within another span of the same name), and
    the seconds that no inner span covers.
    """

    def __init__(self, new_mark: Callable[[], Any], take: Callable[[str, float, float], None]) -> None:
        self._new_mark = new_mark
        self._take = take
        self._free: list[Any] = []
        self._pending: deque[Span] = deque()

    def start(self, name: str, outer: Span | None) -> Span:
        """Mark the beginning of an action, and return its span."""
        return Span(name, self._mark(), outer)

    def stop(self, span: Span) -> None:
        """Mark the end of an action."""
        span.stop = self._mark()
        self._pending.append(span)
        if len(self._pending) >= _PENDING:
            self.read(wait=False)

    def read(self, wait: bool) -> None:
        """Pass the spans that the device has completed to ``take``. If ``wait``, first wait for the device."""
        pending = self._pending
        if wait and pending:
            pending[-1].stop.synchronize()
        while pending and (wait or pending[0].stop.query()):
            span = pending.popleft()
            took = span.start.elapsed_time(span.stop)
            exclusive = max(0.0, took - span.inner) / 1000
            self._take(span.name, 0.0 if span.repeats else took / 1000, exclusive)
            if span.outer is not None:
                span.outer.inner += took
            self._free += (span.start, span.stop)

    def _mark(self) -> Any:
        mark = self._free.pop() if self._free else self._new_mark()
        mark.record()
        return mark


def device_clock(device: torch.device | None, take: Callable[[str, float, float], None]) -> DeviceClock | None:
    """Return a clock for a device; None if it is not a CUDA device."""
    if device is None or device.type != "cuda":
        return None
    return DeviceClock(lambda: torch.cuda.Event(enable_timing=True), take)
