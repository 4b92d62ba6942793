"""Profiler that appends the spans of a run to a file, one JSON object per line."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from ...common.validation import check_text
from .profiler import Profiler, find_running

_SECONDS = 1.0  # between two writes


class EventProfiler(Profiler):
    """Profiler that appends each span, such as a step or a save, to a file of its process, ``events-RANK.jsonl``.

    Each stage begins with a header line and ends with the span of the stage. The file is written once per second, and
    at the end of the stage, even if an error or a signal such as SIGTERM ends it. The schema of the lines is
    ``docs/reference/events.json``.

    Durations are host times: a GPU may still be executing the operations of a span when it ends. This profiler never
    waits for a device.

    Args:
        dirpath: See `Profiler`.
        filename: First part of the name of the files. Default: ``"events"``.
        actions: Names of the actions to write; None for all actions, including each hook.
            Default: ``("data", "step", "validation", "checkpoint")``.

    Raises:
        TypeError: If an argument has the wrong type.

    Examples:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> from treadle.profilers import EventProfiler
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     profiler = EventProfiler(folder)
        ...     with profiler.profile("step"):
        ...         numbers = sorted(range(1000))
        ...     profiler.describe()
        ...     header, event = map(json.loads, Path(folder, "events-0.jsonl").read_text().splitlines())
        >>> event["name"]
        'step'
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str = "events",
        actions: Iterable[str] | None = ("data", "step", "validation", "checkpoint"),
    ) -> None:
        super().__init__(dirpath, check_text("filename", filename))
        if isinstance(actions, str):
            raise TypeError(f"actions={actions!r} must be a list of names. Pass [{actions!r}].")
        self.actions = None if actions is None else frozenset(check_text("actions", name) for name in actions)
        self._begin()

    def _begin(self) -> None:
        self._running: list[tuple[str, float, int | str, int | str]] = []
        self._started = time.perf_counter()
        self._due = self._started + _SECONDS
        header = {"format": 1, "stage": self._stage, "rank": self.local_rank, "time": time.time()}
        self._lines = [json.dumps({**header, "host": socket.gethostname(), "pid": os.getpid()})]

    def start(self, action_name: str) -> None:
        """Begin the span of an action; see `Profiler.start`.

        Args:
            action_name: The name of the action.
        """
        if self.actions is None or action_name in self.actions:
            self._running.append((action_name, time.perf_counter(), *self._position()))

    def stop(self, action_name: str) -> None:
        """End the span of an action; see `Profiler.stop`.

        Args:
            action_name: The name that `start` received.

        Raises:
            ValueError: If no action with this name is running.
            OSError: If the file cannot be written.
        """
        if self.actions is None or action_name in self.actions:
            end = time.perf_counter()
            self._add(*self._running.pop(find_running(self._running, action_name)), end)
            if end >= self._due:
                self._write()

    def describe(self) -> None:
        """Write the span of the stage, and all lines that are not yet written.

        Raises:
            OSError: If the file cannot be written.
        """
        if self._stage is not None:
            self._add(self._stage, self._started, *self._position(), time.perf_counter())
        self._write()

    def _position(self) -> tuple[int | str, int | str]:
        return getattr(self.model, "global_step", "null"), getattr(self.model, "current_epoch", "null")

    def _add(self, name: str, begun: float, step: int | str, epoch: int | str, end: float) -> None:
        # json.dumps of the whole line takes ten times as long.
        self._lines.append(
            f'{{"name": {json.dumps(name)}, "start": {begun - self._started:.6f}, "duration": {end - begun:.6f}, '
            f'"step": {step}, "epoch": {epoch}, "rank": {self.local_rank}}}'
        )

    def _write(self) -> None:
        text = "".join(f"{line}\n" for line in self._lines)
        self._lines.clear()
        directory = Path(self.dirpath or ".")
        directory.mkdir(parents=True, exist_ok=True)
        # In one call, and closed again: a process that is killed leaves whole lines.
        with (directory / f"{self.filename}-{self.local_rank}.jsonl").open("ab") as file:
            file.write(text.encode())
        self._due = time.perf_counter() + _SECONDS
