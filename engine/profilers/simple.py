"""Profiler that measures the duration of each action."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from .device_clock import Span, device_clock
from .profiler import Profiler
from .verdict import Action, verdict


class SimpleProfiler(Profiler):
    """Profiler that counts and times the calls of each action, and reports the bottleneck of the run.

    An action's share of the time excludes nested actions. On CUDA devices, the shares are computed from device time,
    because these devices execute operations asynchronously.

    Args:
        dirpath: See `Profiler`.
        filename: See `Profiler`.
        extended: Also show the number of calls, the longest call and the share of the time. Default: True.

    Attributes:
        actions: The measurements of the current stage, by action name.

    Raises:
        TypeError: If ``dirpath`` or ``filename`` is neither a string nor a path.

    Example:
        >>> import time
        >>> from treadle.profilers import SimpleProfiler
        >>> profiler = SimpleProfiler()
        >>> with profiler.profile("sleep"):
        ...     time.sleep(0.01)
        >>> profiler.actions["sleep"].calls
        1
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self._forget()

    def _forget(self) -> None:
        self.actions: dict[str, Action] = {}
        self._running: list[tuple[str, float, Span | None]] = []
        self._inner: list[float] = []  # seconds spent in actions inside the running ones
        self._clock = device_clock(self.device, self._take)
        self._started = time.perf_counter()

    @property
    def current_actions(self) -> dict[str, float]:
        """Start of each running action, on the clock of ``time.perf_counter``, under Lightning's name."""
        return {name: begun for name, begun, _ in self._running}

    @property
    def recorded_durations(self) -> dict[str, list[float]]:
        """Durations of the calls of each action in seconds, under Lightning's name."""
        return {name: list(action.durations) for name, action in self.actions.items()}

    @property
    def start_time(self) -> float:
        """Start of the measurement, on the clock of ``time.perf_counter``."""
        return self._started

    @property
    def needs_directory(self) -> bool:
        """True if the profiler writes its report to a file; see `Profiler.needs_directory`."""
        return self.filename is not None

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Prepare for a stage, and discard earlier measurements; see `Profiler.setup`.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
            local_rank: Rank to include in file names; None to omit it.
            log_dir: Directory of the profiler's files if ``dirpath`` is not set.
        """
        super().setup(stage, local_rank, log_dir)
        self._forget()

    def start(self, action_name: str) -> None:
        """Begin measuring an action; see `Profiler.start`.

        Args:
            action_name: The name of the action.
        """
        span = None
        if self._clock is not None:
            span = self._clock.start(action_name, self._running[-1][2] if self._running else None)
        self._inner.append(0.0)
        self._running.append((action_name, time.perf_counter(), span))

    def stop(self, action_name: str) -> None:
        """End the measurement of an action; see `Profiler.stop`.

        Args:
            action_name: The name that `start` received.

        Raises:
            ValueError: If no action with this name is running.
        """
        end = time.perf_counter()
        running = self._running
        place = len(running) - 1
        while place >= 0 and running[place][0] != action_name:
            place -= 1
        if place < 0:
            raise ValueError(
                f"stop({action_name!r}) was called, but no action with this name is running. Call "
                f"start({action_name!r}) first."
            )
        _, begun, span = running.pop(place)
        took = end - begun
        exclusive = took - self._inner.pop(place)
        if place:
            self._inner[place - 1] += took
        action = self.actions.get(action_name)
        if action is None:
            action = self.actions[action_name] = Action()
            action.first = exclusive
        action.calls += 1
        action.durations.append(took)
        if all(name != action_name for name, _, _ in running):
            action.total += took
        action.exclusive += exclusive
        if took > action.longest:
            action.longest = took
        if span is not None:
            self._clock.stop(span)  # type: ignore[union-attr]

    def _take(self, name: str, total: float, exclusive: float) -> None:
        action = self.actions[name]
        action.device_total += total
        action.device_exclusive += exclusive
        if action.device_first is None:
            action.device_first = exclusive

    def summary(self) -> str:
        """Return the table of actions and a verdict on the bottleneck; "" if no action was measured.

        The verdict is omitted if no computation was measured.
        """
        elapsed = time.perf_counter() - self._started
        if self._clock is not None:
            self._clock.read(wait=True)
        if not self.actions:
            return ""
        title = f"Profile of {self._stage}" if self._stage else "Profile"
        on_device = self._clock is not None
        lines = [f"{title}: {_format_seconds(elapsed)}", *table(self.actions, elapsed, self.extended, on_device)]
        if self.device is not None and self.device.type != "cpu" and not on_device:
            lines.append(
                f"The process runs ahead of {self.device.type}, so these times cover only launching and waiting."
            )
        if words := verdict(self.actions, self.advice, on_device):
            lines.append(words)
        return "\n".join(lines)


def table(actions: Mapping[str, Action], elapsed: float, extended: bool, on_device: bool) -> list[str]:
    """Return the lines of the table of actions, for a stage of ``elapsed`` seconds."""
    exclusive = {name: a.device_exclusive if on_device else a.exclusive for name, a in actions.items()}
    rest = max(0.0, elapsed - sum(exclusive.values()))
    share = {name: f"{100 * seconds / elapsed:.1f} %" for name, seconds in exclusive.items()}
    heads = ["action", "calls", "mean", *(("device mean",) if on_device else ()), "longest", "total", "own share"]
    rows = []
    for name in sorted(exclusive, key=lambda name: -exclusive[name]):
        a = actions[name]
        mean = [
            _format_seconds(a.total / a.calls),
            *((_format_seconds(a.device_total / a.calls),) if on_device else ()),
        ]
        rows.append([name, str(a.calls), *mean, _format_seconds(a.longest), _format_seconds(a.total), share[name]])
    blanks = [""] * (len(heads) - 3)
    rows.append(["(elsewhere)", *blanks, _format_seconds(rest), f"{100 * rest / elapsed:.1f} %"])
    if not extended:
        columns = [place for place, head in enumerate(heads) if head in ("action", "mean", "device mean", "total")]
        heads, rows = [heads[i] for i in columns], [[row[i] for i in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in [heads, *rows]]


def _format_seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"
