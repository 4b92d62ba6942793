"""Profiler that measures the duration of each action, and names the bottleneck of a run."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .profiler import Profiler, find_running

_PENDING = 4096  # marks waiting to be read; far more than a device can lag behind

ENOUGH = 0.2
"""Minimum share of the time at which the verdict reports work other than computation as the bottleneck."""

COMPUTING = ("forward", "backward", "optimizer", "zero_grad", "clip", "agree", "test_step", "predict_step")
_KINDS = {
    "data": ("waits for data", "Load it in more processes, or make the transforms faster."),
    "transfer": ("moves batches to the device", "DataLoader(pin_memory=True) overlaps the copy with the computation."),
    "logging": ("reduces and writes logged values", "Raise log_every_n_steps, or log fewer values."),
    "validation": ("validates", "Raise val_check_interval, or set limit_val_batches."),
    "checkpoint": ("saves checkpoints", "Save less often, or use ModelCheckpoint(async_save=True)."),
}


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

    Examples:
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
        self._begin()

    def _begin(self) -> None:
        self.actions: dict[str, Action] = {}
        self._running: list[tuple[str, float, Span | None]] = []
        self._inner: list[float] = []  # seconds spent in actions inside the running ones
        self._clock: DeviceClock | None = None
        if self.device is not None and self.device.type == "cuda":
            self._clock = DeviceClock(lambda: torch.cuda.Event(enable_timing=True), self._take)
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
        place = find_running(running, action_name)
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
    unmeasured = max(0.0, elapsed - sum(exclusive.values()))
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
    rows.append(["(elsewhere)", *blanks, _format_seconds(unmeasured), f"{100 * unmeasured / elapsed:.1f} %"])
    if not extended:
        columns = [place for place, head in enumerate(heads) if head in ("action", "mean", "device mean", "total")]
        heads, rows = [heads[i] for i in columns], [[row[i] for i in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in [heads, *rows]]


def _format_seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


class Action:
    """Measurements of all calls of one action, in seconds.

    Attributes:
        calls: Number of completed calls.
        durations: Duration of each call, 8 bytes per call.
        total: Time spent in the action; in a recursion, only the outermost call counts.
        exclusive: Time spent in the action outside of nested actions.
        longest: Duration of the longest call.
        first: ``exclusive`` of the first call, which often takes longer.
        device_total, device_exclusive, device_first: The same in device time, if it is measured.
    """

    __slots__ = (
        *("calls", "device_exclusive", "device_first", "device_total", "durations", "exclusive", "first", "longest"),
        "total",
    )

    def __init__(self) -> None:
        self.calls = 0
        self.durations = array("d")
        self.total = self.exclusive = self.longest = self.first = 0.0
        self.device_total = self.device_exclusive = 0.0
        self.device_first: float | None = None


def kind_of(name: str, alone: bool = False) -> str:
    """Return the category of an action, such as ``"computing"``, or the action's name if it has none.

    If ``alone``, the run does not train, so validation steps count as computing.
    """
    if name in COMPUTING or (alone and name == "validation_step"):
        return "computing"
    if not alone and (name.startswith("validation") or ".on_validation_" in name or name.endswith("of validation")):
        return "validation"
    return next((kind for kind in _KINDS if name.startswith(kind)), name)


def verdict(actions: Mapping[str, Action], advice: Mapping[str, str], on_device: bool) -> str:
    """Return a sentence about the bottleneck of the run; "" if no computation was measured.

    ``advice`` maps the names of actions to text that replaces the default advice.
    """
    spent: dict[str, float] = {}
    slowest: dict[str, tuple[float, str]] = {}  # the action of each kind that takes the most time
    alone = "forward" not in actions
    for name, action in actions.items():
        kind = kind_of(name, alone)
        exclusive, first = (
            (action.device_exclusive, action.device_first or 0.0) if on_device else (action.exclusive, action.first)
        )
        seconds = exclusive - (first if action.calls > 1 else 0.0)
        spent[kind] = spent.get(kind, 0.0) + seconds
        slowest[kind] = max(slowest.get(kind, (0.0, "")), (seconds, name))
    total = sum(spent.values())
    if "computing" not in spent or total <= 0:
        return ""
    subject = "the device" if on_device else "this run"
    overheads = {kind: seconds for kind, seconds in spent.items() if kind not in ("computing", "step", "training")}
    worst = max(overheads, key=lambda kind: overheads[kind], default="")
    if worst and overheads[worst] / total >= ENOUGH:
        if worst not in _KINDS:
            return f"Verdict: {subject} spends {_to_percent(overheads[worst] / total)} of the time in {worst}."
        does, usual = _KINDS[worst]
        remedy = advice.get(slowest[worst][1], usual)
        return f"Verdict: {subject} {does} {_to_percent(overheads[worst] / total)} of the time. {remedy}"
    text = f"Verdict: {subject} computes {_to_percent(spent['computing'] / total)} of the time"
    if worst:
        does = _KINDS[worst][0] if worst in _KINDS else f"is in {worst}"
        text += f" and {does} {_to_percent(overheads[worst] / total)} of it"
    return text + "."


def _to_percent(share: float) -> str:
    return f"{100 * share:.0f} %"


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
