"""Planned failures at exact points of a real run, and a check that each of them happened; see docs/internals.md."""

from __future__ import annotations

import builtins
import dataclasses
import errno
import functools
import gc
import json
import os
import signal
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..callbacks import HOOKS
from ..common.messages import format_count, nearest
from ..common.validation import check_int
from ..engine import Accelerator
from ..engine.checkpoint import filesystem
from ..engine.optim import Accumulation
from ..strategies.distributed import current_place
from ..trainer.loop import Hooks

__all__ = [
    "OPERATIONS",
    "POINTS",
    "DiskPoint",
    "Fault",
    "FaultInjected",
    "FaultPlan",
    "FaultsNotFired",
    "Firing",
    "disk_points",
    "forked",
]

_WRITES = ("write_bytes", "write_tensors", "write_stream")

OPERATIONS = ("mkdir", *_WRITES, "fsync", "rename", "replace", "unlink", "rmdir")
"""Functions of `treadle.engine.checkpoint.filesystem` that change files."""

POINTS: tuple[str, ...] = (
    *(f"{part}:{moment}" for part in ("forward", "backward", "step") for moment in ("before", "after")),
    *(f"callback:{hook}:{moment}" for hook in HOOKS for moment in ("before", "after")),
    *(f"disk:{name}:{m}" for name in OPERATIONS for m in ("before", "half", "after") if m != "half" or name in _WRITES),
)
"""All points at which a fault can happen."""


class Places:
    """Interceptor of points in a run. While armed, it performs the firings that are due at each point.

    Args:
        due: Function that is called as ``due(point, *paths)`` and returns the list of due firings.
        happen: Function that performs these firings.
        active_points: Points to intercept.

    Attributes:
        step: Optimizer step in progress, which lasts until the next one begins; 0 before the first step.
    """

    def __init__(
        self, due: Callable[..., list[Any]], happen: Callable[[list[Any]], None], active_points: Iterable[str]
    ) -> None:
        self.due = due
        self.happen = happen
        self.active_points = frozenset(active_points)
        self.step = 0
        self._undo: ExitStack | None = None
        self._inside: Any = None  # the outermost forward that is running
        self._accumulations: weakref.WeakSet[Accumulation] = weakref.WeakSet()
        self._progress: weakref.WeakKeyDictionary[Accumulation, Any] = weakref.WeakKeyDictionary()

    def __enter__(self) -> Places:
        if self._undo is not None:
            raise RuntimeError("this plan is already armed. Leave its with block before entering it again.")
        with ExitStack() as undo:
            self._arm(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        undo, self._undo = self._undo, None
        assert undo is not None
        undo.close()

    def _arm(self, undo: ExitStack) -> None:
        kinds = {point.split(":")[0] for point in self.active_points}
        _replace(undo, Accumulation, "backward", self._wrap_backward)  # these two also determine the step
        _replace(undo, Hooks, "__init__", self._wrap_hooks)
        if "disk" in kinds:
            for name in OPERATIONS:
                _replace(undo, filesystem, name, functools.partial(self._wrap_operation, name))
        if "step" in kinds:
            undo.callback(
                register_optimizer_step_pre_hook(functools.partial(self._reach_at_step, "step:before")).remove
            )
            undo.callback(
                register_optimizer_step_post_hook(functools.partial(self._reach_at_step, "step:after")).remove
            )
        if "forward" in kinds:
            # A prepared model may be the user's own object, so only the Accelerator that prepared it can identify it.
            self._accumulations.update(o for o in gc.get_objects() if issubclass(type(o), Accumulation))
            _replace(undo, Accelerator, "prepare_model", self._wrap_prepare_model)
            _replace(undo, Accelerator, "method", self._wrap_method)
            before, after = map(torch.compiler.disable, (self._enter_forward, self._leave_forward))
            undo.callback(register_module_forward_pre_hook(before).remove)
            undo.callback(register_module_forward_hook(after, always_call=True).remove)

    def _reach(self, point: str, *paths: str) -> None:
        # Objects created while armed (a Trainer's hooks, a scheduler's wrapper of a step) may outlive it.
        if self._undo is not None and point in self.active_points and (due := self.due(point, *paths)):
            self.happen(due)

    def _work(self, accumulation: Accumulation) -> None:
        self._accumulations.add(accumulation)
        progress = self._progress.get(accumulation)
        self.step = 1 + (accumulation.steps if progress is None else progress.step)

    # -- replacements of Treadle's functions ---------------------------------------------------------------------

    def _wrap_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        def backward(accumulation: Accumulation, *args: Any, **kwargs: Any) -> None:
            self._work(accumulation)
            self._reach("backward:before")
            original(accumulation, *args, **kwargs)
            self._reach("backward:after")

        return backward

    def _wrap_hooks(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(hooks: Hooks, trainer: Any, *args: Any) -> None:
            original(hooks, trainer, *args)
            assert self._undo is not None
            accumulation = trainer.accelerator.accumulation
            self._progress[accumulation] = trainer.progress
            for name in HOOKS:
                called = getattr(hooks, name)
                around = [functools.partial(self._reach_in_hook, f"callback:{name}:{m}") for m in ("before", "after")]
                before, after = ([hook] if hook.args[0] in self.active_points else [] for hook in around)
                if name == "on_train_batch_start":
                    before.insert(0, functools.partial(self._begin, accumulation))
                if before or after:
                    setattr(hooks, name, (*before, *called, *after))
                    self._undo.callback(setattr, hooks, name, called)

        return init

    def _reach_in_hook(self, point: str, *_: Any) -> None:
        self._reach(point)

    def _begin(self, accumulation: Accumulation, *_: Any) -> None:
        self._work(accumulation)

    def _wrap_operation(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        before, half, after = (f"disk:{name}:{moment}" for moment in ("before", "half", "after"))

        def operation(*args: Any, **kwargs: Any) -> Any:
            paths = [os.fspath(value) for value in (*args, *kwargs.values()) if isinstance(value, os.PathLike)]
            self._reach(before, *paths)
            if half in self.active_points and (due := self.due(half, *paths)):
                original(*args, **kwargs)
                os.truncate(paths[0], os.path.getsize(paths[0]) // 2)
                self.happen(due)
            # After a delay the whole file is written, and stays the same file: a watchdog that reads the stack of a
            # stopped rank lets it go on for a moment, and what is half written is removed by its inode.
            result = original(*args, **kwargs)
            self._reach(after, *paths)
            return result

        return operation

    def _reach_at_step(self, point: str, optimizer: Optimizer, *_: Any) -> None:
        for accumulation in self._accumulations:
            if any(prepared.optimizer is optimizer for prepared in accumulation.optimizers):
                self._work(accumulation)
                self._reach(point)
                return

    def _wrap_prepare_model(self, original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def prepare_model(accelerator: Accelerator, *args: Any, **kwargs: Any) -> nn.Module:
            self._accumulations.add(accelerator.accumulation)
            return original(accelerator, *args, **kwargs)

        return prepare_model

    def _wrap_method(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(accelerator: Accelerator, *args: Any, **kwargs: Any) -> Callable[..., Any]:
            call = original(accelerator, *args, **kwargs)

            @functools.wraps(call)
            def run(*args: Any, **kwargs: Any) -> Any:
                self._inside = call  # the modules that it calls are a part of it
                try:
                    self._work(accelerator.accumulation)
                    self._reach("forward:before")
                    output = call(*args, **kwargs)
                    self._reach("forward:after")
                    return output
                finally:
                    self._inside = None

            return run

        return method

    def _enter_forward(self, module: nn.Module, *_: Any) -> None:
        if self._inside is not None or not torch.is_grad_enabled():
            return
        for accumulation in self._accumulations:
            if any(prepared in (module, module._modules.get("_orig_mod")) for prepared in accumulation.models):
                self._inside = module
                self._work(accumulation)
                self._reach("forward:before")
                return

    def _leave_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._inside is module:
            self._inside = None
            if output is not None:  # otherwise it raised an error
                self._reach("forward:after")


def _replace(undo: ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace a function with ``wrap(function)`` until ``undo`` closes."""
    if isinstance(owner, type):
        owner = next(kind for kind in owner.__mro__ if name in vars(kind))
    original = vars(owner)[name]
    undo.callback(setattr, owner, name, original)
    setattr(owner, name, functools.wraps(original)(wrap(original)))


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
        point: Point in the run, such as ``"backward:after"`` or ``"disk:*"``; docs/internals.md lists the points.
        action: Action to perform; docs/internals.md lists the actions. Default: ``"raise"``.
        rank: Rank on which the fault happens. Default: None, every rank.
        step: Optimizer step in which the fault happens, counted from 1, until the next step begins. Step 0 is
            everything before the first step in this process. Default: None, any step.
        occurrence: Number of the matching visit to the point at which the fault happens, counted from 1 in each
            process. Default: 1.
        match: For disk points, a pattern for the path, such as ``"*/model*"``. Default: None, any path.

    Raises:
        TypeError, ValueError: If an argument is invalid.

    Examples:
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

    Examples:
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

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._places.__exit__()
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
