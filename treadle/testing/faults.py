"""Planned failures at exact points of a real run, and a check that each of them happened; see docs/faults.md."""

from __future__ import annotations

import builtins
import dataclasses
import errno
import functools
import json
import os
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from ..common.messages import format_count, nearest
from ..common.validation import check_int
from ..strategies.distributed import current_place
from .places import OPERATIONS, POINTS, Places

__all__ = [
    "OPERATIONS",
    "POINTS",
    "DiskPoint",
    "Fault",
    "FaultInjected",
    "FaultPlan",
    "FaultsNotFired",
    "Firing",
    "armed_from_environment",
    "disk_points",
    "forked",
]

_VARIABLE = "TREADLE_FAULTS"


class FaultInjected(RuntimeError):
    """Error that a planned fault raises if its action is ``"raise"`` and names no other exception."""


class Firing(NamedTuple):
    """Occurrence of a fault. ``fault`` is the fault's index in the plan."""

    fault: int
    point: str
    rank: int
    step: int
    pid: int
    path: str | None = None


Action = str | BaseException | type[BaseException] | Callable[[Firing], Any]


@dataclasses.dataclass(frozen=True, repr=False)
class Fault:
    """Planned failure that happens once on each selected process.

    Args:
        point: Point in the run, such as ``"backward:after"`` or ``"disk:*"``; docs/faults.md lists the points.
        action: Action to perform; docs/faults.md lists the actions. Default: ``"raise"``.
        rank: Rank on which the fault happens. Default: None, every rank.
        step: Optimizer step in which the fault happens, counted from 1, until the next step begins. Step 0 is
            everything before the first step in this process. Default: None, any step.
        occurrence: Number of the matching visit to the point at which the fault happens, counted from 1 in each
            process. Default: 1.
        match: For disk points, a pattern for the path, such as ``"*/model*"``. Default: None, any path.

    Raises:
        TypeError, ValueError: If an argument is invalid.

    Example:
        >>> Fault("backward:after", "raise:ValueError", rank=1, step=3)
        Fault(point='backward:after', action='raise:ValueError', rank=1, step=3)
    """

    point: str
    action: Action = "raise"
    _: dataclasses.KW_ONLY
    rank: int | None = None
    step: int | None = None
    occurrence: int = 1
    match: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("rank", 0), ("step", 0), ("occurrence", 1)):
            value = getattr(self, name)
            if value is None and name != "occurrence":
                continue
            check_int(name, value, least)
        if not isinstance(self.point, str):
            raise TypeError(f"point={self.point!r} must be a name, such as 'backward:after' or 'disk:*'.")
        written = self.point
        parts = written.split(":")
        if len(parts) < (3 if parts[0] in ("callback", "disk") else 2):
            object.__setattr__(self, "point", f"{self.point}:before")
        if not self.places:
            raise ValueError(f"point={written!r} matches none of faults.POINTS.{nearest(self.point, POINTS)}")
        on_disk = all(place.startswith("disk:") for place in self.places)
        if self.match is not None and not (on_disk and isinstance(self.match, str)):
            raise ValueError(
                f"match={self.match!r} with point={written!r}: match must be a pattern for paths, such as '*/model*', "
                "and applies only to disk points."
            )
        if _parse(self.action)[0] == "oserror" and not on_disk:
            raise ValueError(
                f"action={self.action!r} is only for disk points, but point={written!r} is not a disk point."
            )

    @functools.cached_property
    def places(self) -> frozenset[str]:
        """Names in ``POINTS`` that ``point`` matches."""
        return frozenset(place for place in POINTS if fnmatchcase(place, self.point))

    def __repr__(self) -> str:
        fields = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return f"Fault({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields)})"

    def happen(self, firing: Firing) -> None:
        """Perform the action. An action that is a function receives ``firing``."""
        kind, value = _parse(self.action)
        if kind == "call":
            value(firing)
        elif kind == "raise":
            text = f"planned: fault {firing.fault}, {firing.point} on rank {firing.rank} in step {firing.step}"
            raise value(text) if isinstance(value, type) else value
        elif kind == "oserror":
            raise OSError(value, os.strerror(value), firing.path)
        elif kind == "exit":
            os._exit(value)
        elif kind == "kill":
            signal.raise_signal(value)
        else:
            end = time.monotonic() + value
            while (remaining_seconds := end - time.monotonic()) > 0:
                time.sleep(min(remaining_seconds, 3600.0))


def _parse(action: Any) -> tuple[str, Any]:
    """Return an action's kind, such as ``"exit"``, and its parsed value, such as the exit status."""
    if isinstance(action, BaseException) or (isinstance(action, type) and issubclass(action, BaseException)):
        return "raise", action
    if not isinstance(action, str):
        if callable(action) and not isinstance(action, type):
            return "call", action
        raise TypeError(f"action={action!r} must be a name, an exception or a function that accepts a Firing.")
    kind, _, value = action.partition(":")
    exceptions = {n: v for n, v in vars(builtins).items() if isinstance(v, type) and issubclass(v, BaseException)}
    named: dict[str, tuple[str, Mapping[str, Any]]] = {
        "raise": ("FaultInjected", {"FaultInjected": FaultInjected, **exceptions}),
        "kill": ("SIGKILL", signal.Signals.__members__),
        "oserror": ("EIO", {name: number for number, name in errno.errorcode.items()}),
    }
    if kind in named:
        usual, table = named[kind]
        if (value or usual) not in table:
            noun = "signal" if kind == "kill" else "error"
            raise ValueError(f"action={action!r} names the unknown {noun} {value!r}.{nearest(value, table)}")
        return kind, table[value or usual]
    try:
        if kind == "exit" and 0 <= (status := int(value or "1")) <= 255:
            return kind, status
        if kind in ("hang", "delay") and (seconds := float(value or ("inf" if kind == "hang" else "nan"))) >= 0:
            return kind, seconds
    except ValueError:
        pass
    if kind in ("exit", "hang", "delay"):
        raise ValueError(
            f"action={action!r} needs a number in range, as in 'exit:3' (0 to 255), 'hang:30' or 'delay:0.5' (seconds, "
            "at least 0)."
        )
    kinds = (*named, "exit", "hang", "delay")
    raise ValueError(f"action={action!r} is not one of {', '.join(kinds)}.{nearest(kind, kinds)}")


class FaultsNotFired(AssertionError):
    """Error raised because a planned fault did not happen exactly once."""


class FaultPlan:
    """Faults that happen in this process while the plan is armed, that is, inside ``with plan:``.

    If the block ends without an error, the plan raises `FaultsNotFired` if a fault for this rank did not happen exactly
    once, or if a fault's rank does not exist. A fault happens once per process or, with a record, once per rank over
    all restarts.

    Args:
        faults: Faults to inject.
        record: A file to which each firing is appended before its action is performed. A recorded firing does not
            happen again. All processes of a run may share one file. Default: None, no record.

    Raises:
        TypeError, ValueError: If an argument is invalid.

    Example:
        >>> with FaultPlan([Fault("disk:fsync", "delay:0.0")], record=None) as plan:
        ...     from treadle.engine.checkpoint import filesystem
        ...     filesystem.fsync(Path("."))
        >>> [firing.point for firing in plan.firings]
        ['disk:fsync:before']
    """

    def __init__(self, faults: Iterable[Fault], *, record: str | os.PathLike[str] | None = None) -> None:
        self.faults = tuple(faults)
        for fault in self.faults:
            if not isinstance(fault, Fault):
                raise TypeError(f"a plan must consist of Faults, but contains {fault!r}.")
            if self.faults.count(fault) > 1:
                raise ValueError(f"{fault} is planned twice. Give each fault its own occurrence.")
        if not self.faults:
            raise ValueError("a plan needs at least one fault.")
        self.record = None if record is None else Path(os.path.abspath(record))
        self._places = Places(
            self._collect_due, self._happen, (place for fault in self.faults for place in fault.places)
        )
        self._fired: list[Firing] = []
        self._reached = [0] * len(self.faults)
        self._lock = threading.Lock()

    # -- firings -------------------------------------------------------------------------------------------------

    @property
    def firings(self) -> list[Firing]:
        """Firings of this process or, with a record, of all processes.

        Raises:
            ValueError: If a recorded firing has a fault number that this plan lacks, or a point that this fault does
                not match. Other differences are not detected.
        """
        if self.record is None:
            return list(self._fired)
        if not self.record.exists():
            return []
        lines = self.record.read_text().splitlines(keepends=True)
        firings = [Firing(**json.loads(line)) for line in lines if line.endswith("\n")]
        for firing in firings:
            if firing.fault >= len(self.faults) or firing.point not in self.faults[firing.fault].places:
                raise ValueError(
                    f"{self.record} contains {firing}, which belongs to another plan. Give each plan its own file."
                )
        return firings

    def check(self, world_size: int = 1) -> None:
        """Raise `FaultsNotFired` unless each fault happened exactly once on each selected rank, over all restarts.

        Without a record, the plan knows only the faults that happened in this process.
        """
        self._check(
            {
                (n, rank)
                for n, f in enumerate(self.faults)
                for rank in (range(world_size) if f.rank is None else [f.rank])
            },
            Counter((firing.fault, firing.rank) for firing in self.firings),
        )

    def _check_local(self) -> None:
        rank, size, _ = current_place()
        expected = {
            (number, rank if fault.rank is None else fault.rank)
            for number, fault in enumerate(self.faults)
            if fault.rank is None or fault.rank == rank or fault.rank >= size
        }
        fired = ((firing.fault, firing.rank) for firing in self.firings)
        self._check(expected, Counter(pair for pair in fired if pair in expected))

    def _check(self, expected: set[tuple[int, int]], fired: Counter[tuple[int, int]]) -> None:
        mismatches = [
            f"fault {number}, {self.faults[number]}, happened {format_count(fired[number, rank], 'time')} on rank "
            f"{rank}; this process reached its point {format_count(self._reached[number], 'time')}"
            for number, rank in sorted({*expected, *fired})
            if fired[number, rank] != ((number, rank) in expected)
        ]
        if mismatches:
            raise FaultsNotFired("\n".join(mismatches))

    # -- arming --------------------------------------------------------------------------------------------------

    def __enter__(self) -> FaultPlan:
        if self.record is not None:
            self.record.open("a").close()  # an error is raised now, not when a fault fires
            _ = self.firings
        self._places.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._places.__exit__(kind, error, trace)
        if error is None:
            self._check_local()

    def _collect_due(self, point: str, *paths: str) -> list[Firing]:
        due = []
        with self._lock:
            for number, fault in enumerate(self.faults):
                if point not in fault.places or fault.step not in (None, self._places.step):
                    continue
                if fault.match is not None and not any(fnmatchcase(path, fault.match) for path in paths):
                    continue
                if fault.rank not in (None, rank := current_place()[0]):
                    continue
                self._reached[number] += 1
                if self._reached[number] == fault.occurrence:
                    due.append(Firing(number, point, rank, self._places.step, os.getpid(), *paths[:1]))
        recorded = {(firing.fault, firing.rank) for firing in self.firings} if due else set()
        return [firing for firing in due if (firing.fault, firing.rank) not in recorded]

    def _happen(self, due: list[Firing]) -> None:
        for firing in due:
            self._fired.append(firing)
            if self.record is not None:
                file = os.open(self.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                try:
                    os.write(file, json.dumps(firing._asdict()).encode() + b"\n")
                    os.fsync(file)
                finally:
                    os.close(file)
            self.faults[firing.fault].happen(firing)

    # -- plans of other processes --------------------------------------------------------------------------------

    def to_env(self) -> dict[str, str]:
        """Return the environment variable that passes this plan to `armed_from_environment` in another process.

        Raises:
            TypeError: If an action is not a string.
        """
        for fault in self.faults:
            if not isinstance(fault.action, str):
                raise TypeError(
                    f"{fault}: only an action that is a string, such as 'raise:ValueError', can be passed to another "
                    "process."
                )
        plan = {"faults": [dataclasses.asdict(f) for f in self.faults], "record": self.record and str(self.record)}
        return {_VARIABLE: json.dumps(plan)}


def armed_from_environment(env: Mapping[str, str] = os.environ) -> AbstractContextManager[FaultPlan | None]:
    """Return a context manager that arms the plan that `FaultPlan.to_env` stored in ``env``, if there is one."""
    if not env.get(_VARIABLE):
        return nullcontext()
    plan = json.loads(env[_VARIABLE])
    return FaultPlan([Fault(**fault) for fault in plan["faults"]], record=plan["record"])


# -- each disk operation in turn -------------------------------------------------------------------------------------


class DiskPoint(NamedTuple):
    """Moment at which a disk operation can fail.

    Attributes:
        operation: Name of the operation, such as ``"fsync"``.
        moment: ``"before"``, ``"half"`` or ``"after"``.
        number: Number among the operations of all kinds that reached this moment, counted from 1.
        path: First path of the operation.
    """

    operation: str
    moment: str
    number: int
    path: str

    def fault(self, action: Action = "kill", **fault_options: Any) -> Fault:
        """Return a fault that happens at this moment when the work is repeated. The options are those of `Fault`."""
        return Fault(f"disk:*:{self.moment}", action, occurrence=self.number, **fault_options)


def disk_points(work: Callable[[], Any]) -> list[DiskPoint]:
    """Run ``work`` and return, in order, every moment at which one of Treadle's disk operations in it can fail."""
    points: list[DiskPoint] = []
    counts: Counter[str] = Counter()

    def note(point: str, *paths: str) -> list[Any]:
        _, operation, moment = point.split(":")
        counts[moment] += 1
        points.append(DiskPoint(operation, moment, counts[moment], paths[0]))
        return []

    with Places(note, lambda due: None, (point for point in POINTS if point.startswith("disk:"))):
        work()
    return points


def forked(work: Callable[[], Any], *faults: Fault, record: str | os.PathLike[str] | None = None) -> int:
    """Run ``work`` under a plan in a forked child process, wait for the child, and return its exit status.

    The status is 0 if the work was done and every fault for this rank happened, and 1 if an error was raised, which is
    printed. A planned ``exit`` or a `SystemExit` sets its own status. If a signal killed the child, the status is
    negative, such as -9.
    """
    child = os.fork()
    if child == 0:
        status = 1
        torch.set_num_threads(1)  # OpenMP's other threads are not in the fork, which would wait for them forever
        try:
            with FaultPlan(faults, record=record):
                work()
            status = 0
        except SystemExit as left:  # the interpreter would end this way; fit does so after a SIGTERM
            status = left.code if isinstance(left.code, int) else int(left.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
