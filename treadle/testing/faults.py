"""Planned failures at exact points of a real run, and a check that each of them happened; see docs/faults.md."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from ..common.messages import format_count
from ..strategies.distributed import current_place
from .fault import Action, Fault, FaultInjected, Firing
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
