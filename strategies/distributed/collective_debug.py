"""Comparison of the processes' calls before each collective of `World`, enabled by ``TREADLE_DEBUG=1``."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...common.messages import describe_error, named_ranks, warn
from .launch_environment import DebugEnvironment
from .waiting_call import DistributedOperationException, describe_calls
from .world import World

_NOT_THE_USERS = ("treadle", "torch", "lightning_utilities", "contextlib", "functools")
# Often written in two branches: `if main: prepare(); wait() else: wait()`, or one branch sends and the other receives.
_MAY_STAND_APART = ("barrier", "broadcast", "broadcast_tensor")
_ENDED = "has ended"
_MATCHING, _NOTE, _DIFFERENT, _MISSING = "=", "~", "!", "?"  # the first letter of a meeting's result


@dataclass(frozen=True)
class Call:
    """Call of a collective by one process, as it is reported to the other processes.

    Attributes:
        operation: Name of the `World` method and its arguments, such as ``"all_reduce sum"``.
        value: Dtype, shape and device type of the tensor, if any.
        name: Name of the function that the user called, such as ``"gather"`` or ``"fit"``.
        inside: Treadle's inner function that makes the call, with its file and line, if it differs from ``name``.
        path: Path of the user's file that makes the call.
        line: Line number in the user's file, and the function that contains the line.
    """

    operation: str
    value: str = ""
    name: str = ""
    inside: str = ""
    path: str = ""
    line: str = ""

    def __str__(self) -> str:
        action = f"{self.operation} of {self.value}" if self.value else self.operation
        return " ".join(filter(None, (action, self.place)))

    @property
    def place(self) -> str:
        """Location of the call, as text."""
        name = f"in {self.name}" if self.name else ""
        inside = f"({self.inside})" if self.inside else ""
        return " ".join(filter(None, (name, inside, f"at {self.path}:{self.line}" if self.path else "")))

    @property
    def location_key(self) -> tuple[str, ...]:
        """Key by which locations are compared.

        Folders and the line numbers in Treadle's files are not part of the key, because they may differ between ranks.
        """
        return (Path(self.path).name, self.line, re.sub(r":\d+", "", self.inside))

    @classmethod
    def from_stack(cls, operation: str, value: torch.Tensor | None = None) -> Call:
        """Return a `Call` of ``operation`` with the location that the current stack shows."""
        form = "" if value is None else f"{str(value.dtype)[6:]} {list(value.shape)} on {value.device.type}"
        frame: FrameType | None = sys._getframe(1)
        outer = inner = None
        while frame is not None and (module := str(frame.f_globals.get("__name__"))).split(".")[0] in _NOT_THE_USERS:
            if module.startswith("treadle."):
                outer = frame
                if inner is None and module not in (__name__, World.__module__):
                    inner = frame
            frame = frame.f_back
        name = "" if outer is None else outer.f_code.co_name
        inside = ""
        if inner is not None and inner.f_code.co_name != name:  # otherwise a public method that passes the call on
            inside = _describe_frame(inner, Path(inner.f_code.co_filename).name)
        if frame is None:
            return cls(operation, form, name, inside)
        path = frame.f_code.co_filename
        with contextlib.suppress(ValueError, OSError):  # it is not below, or the working directory was deleted
            path = str(Path(path).relative_to(Path.cwd()))
        return cls(operation, form, name, inside, path, _describe_frame(frame))


def _describe_frame(frame: FrameType, file: str = "") -> str:
    return f"{file}{':' if file else ''}{frame.f_lineno} {frame.f_code.co_name}"


class Meeting:
    """Comparison of calls through torch's store, which responds even if some processes are missing.

    Each call has one verdict, which applies to all processes. ``ranks`` lists the global ranks of the group, and
    ``position`` is the index of this process in it. ``timeout`` is the number of seconds that a process waits for the
    others.
    """

    def __init__(self, store: dist.Store, ranks: Sequence[int], position: int, timeout: float) -> None:
        self._store = store
        self._ranks = ranks
        self._position = position
        self._timeout = timeout
        self._note = ""
        self._broken = ""
        self._process = os.getpid()
        atexit.register(self.leave)

    def arrive(self, call: Call) -> None:
        """Report this process's call, and wait until it has been compared with the calls of the other processes.

        A difference that may be intended, such as a barrier in two branches, only causes a warning.

        Raises:
            DistributedOperationException: If the calls do not match or cannot be compared.
        """
        if self._broken:
            raise DistributedOperationException(self._broken)
        try:
            number, last = self._register(call)
            verdict = self._compare(number) if last else self._await(number)
        except dist.DistNetworkError as error:
            raise DistributedOperationException(
                f"{call}: the store in which the processes compare their calls is not available ({error}). The "
                "process that hosts it, usually rank 0, has ended."
            ) from None
        kind, text = verdict[:1], verdict[1:]
        if kind == _NOTE:
            self._note = text
            warn(text)
        elif kind != _MATCHING:
            self._broken = text if kind == _MISSING else ""
            raise DistributedOperationException(text)

    def leave(self) -> None:
        """Record that this process ends, so that other processes do not wait for its next call."""
        if os.getpid() != self._process:
            return
        with contextlib.suppress(RuntimeError):  # the store may have ended with its process
            if self._store.add(f"left {self._position}", 1) > 1:
                return
            error = getattr(sys, "last_value", None)
            ending = _ENDED if error is None else f"{_ENDED} with {describe_error(error)}"
            last_call = self._call(self._position)
            number, last = self._register(Call(f"{ending}; its last call was {last_call[1]}" if last_call else ending))
            if last:
                self._compare(number)

    def _register(self, call: Call) -> tuple[int, bool]:
        number = self._store.add(f"calls of {self._position}", 1)
        self._store.set(f"call of {self._position}", json.dumps([number, asdict(call)]))
        return number, self._store.add(f"{number} here", 1) == len(self._ranks)

    def _call(self, position: int) -> tuple[int, Call] | None:
        if not self._store.check([f"call of {position}"]):
            return None
        number, call = json.loads(self._store.get(f"call of {position}"))
        return number, Call(**call)

    def _compare(self, number: int) -> str:
        calls = [entry[1] for position in range(len(self._ranks)) if (entry := self._call(position)) is not None]
        for name in ("here", "verdict"):  # all ranks have read these, otherwise they would not be here
            self._store.delete_key(f"{number - 1} {name}")
        return self._publish(number, verdict_on(calls, self._ranks, self._note))

    def _publish(self, number: int, verdict: str) -> str:
        """Store the verdict unless another process was faster, and return the verdict that applies."""
        return self._store.compare_set(f"{number} verdict", "", verdict).decode()

    def _await(self, number: int) -> str:
        # Polled, because the store's own wait delays signal handlers and prints a message when it times out.
        deadline, pause = time.monotonic() + self._timeout, 0.0001
        while time.monotonic() < deadline:
            if self._store.check([f"{number} verdict"]):
                return self._store.get(f"{number} verdict").decode()
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)
        last_calls = [self._call(position) for position in range(len(self._ranks))]
        return self._publish(number, _MISSING + self._describe_missing(number, last_calls))

    def _describe_missing(self, number: int, last_calls: Sequence[tuple[int, Call] | None]) -> str:
        arrived = {
            rank: str(entry[1])
            for rank, entry in zip(self._ranks, last_calls, strict=True)
            if entry and entry[0] >= number
        }
        absent = {
            rank: f"missing; its last call was {entry[1]}" if entry else "missing; it has not made a call yet"
            for rank, entry in zip(self._ranks, last_calls, strict=True)
            if not entry or entry[0] < number
        }
        return (
            f"{named_ranks(list(absent))} did not make a call that needs all processes within {self._timeout:g} s:\n"
            f"{describe_calls({**arrived, **absent})}\n"
            "A call that only some processes make (`if accelerator.is_main_process:`) never ends. A process may also "
            "have failed, wait in another call (such as a DDP backward pass), or need more time. TREADLE_DEBUG_TIMEOUT "
            f"sets the timeout in seconds.{_quote_note(self._note)}"
        )


def verdict_on(calls: Sequence[Call], ranks: Sequence[int], note: str = "") -> str:
    """Return the verdict on the calls: "=" (match), or a message after "~" (note), "!" (different) or "?" (missing)."""
    listed = describe_calls({rank: str(call) for rank, call in zip(ranks, calls, strict=True)})
    ended_ranks = [rank for rank, call in zip(ranks, calls, strict=True) if call.operation.startswith(_ENDED)]
    if len(ended_ranks) == len(calls):
        return _MATCHING
    if ended_ranks:
        problem = f"{named_ranks(ended_ranks)} will not make a call that needs all processes"
        return f"{_MISSING}{problem}:\n{listed}{_quote_note(note)}"
    equal = {
        "the operation": len({(call.operation, call.name) for call in calls}) == 1,
        "the tensor": len({call.value for call in calls}) == 1,
        "the line": len({call.location_key for call in calls}) == 1,
    }
    if all(equal.values()):
        return _MATCHING
    if equal["the operation"] and equal["the tensor"] and calls[0].operation.split()[0] in _MAY_STAND_APART:
        return (
            f"{_NOTE}the processes make the call {calls[0].operation} from different lines:\n"
            f"{listed}\n"
            "If this is not intended, a process skipped a call."
        )
    differ = " and ".join(aspect for aspect, is_equal in equal.items() if not is_equal)
    advice = (
        "Dtypes and shapes must be the same. Call pad_across_processes to make shapes equal. gather supports "
        "different lengths in dimension 0."
        if equal["the operation"] and equal["the line"]
        else "All processes must make the same calls in the same order. Look for a call under a condition that holds "
        "only on some processes, and make the call on all of them."
    )
    return f"{_DIFFERENT}the processes make calls that differ in {differ}:\n{listed}\n{advice}{_quote_note(note)}"


def _quote_note(note: str) -> str:
    return f"\nEarlier: {note}" if note else ""


class DebugWorld(World):
    """World whose processes compare each collective before it starts, for ``TREADLE_DEBUG=1``."""

    def __init__(self, *, debug: DebugEnvironment | None = None, **place: Any) -> None:
        super().__init__(**place)
        self.debug = debug or DebugEnvironment.read() or DebugEnvironment()
        if self.size == 1:
            return
        ranks = list(range(self.size)) if self.group is None else dist.get_process_group_ranks(self.group)
        name = "world" if self.group is None else f"{self.group.group_name} {ranks[0]}"
        # Private, but present in torch from 1.x to 2.13: the store that the group was created with.
        store = dist.PrefixStore(f"treadle debug/{name}", dist.distributed_c10d._get_default_store())
        self._meeting = Meeting(store, ranks, self.rank, self.debug.timeout)

    def _compare(self, operation: str, tensor: torch.Tensor | None = None) -> None:
        if self.size > 1:
            self._meeting.arrive(Call.from_stack(operation, tensor))

    def mesh(self, **dimensions: int) -> DeviceMesh:
        """See `World.mesh`."""
        if tuple(dimensions.items()) not in self._meshes:  # only the first one involves an exchange
            self._compare(" ".join(("mesh", *(f"{name}={size}" for name, size in dimensions.items()))))
        return super().mesh(**dimensions)

    def meet(self, call: str) -> None:
        """Compare the call as if it were a collective, so that an error shows the last calls of the missing ranks."""
        self._compare("meet")

    def barrier(self) -> None:
        """See `World.barrier`."""
        self._compare("barrier")
        super().barrier()

    def all_reduce(self, tensor: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        """See `World.all_reduce`."""
        self._compare(f"all_reduce {operation}", tensor)
        return super().all_reduce(tensor, operation)

    def start_all_reduce(self, tensor: torch.Tensor) -> dist.Work | None:
        """See `World.start_all_reduce`."""
        self._compare("start_all_reduce", tensor)
        return super().start_all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See `World.all_gather`."""
        self._compare("all_gather", tensor)
        return super().all_gather(tensor)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `World.reduce_scatter`."""
        self._compare("reduce_scatter", tensor)
        return super().reduce_scatter(tensor)

    def gather_objects(self, value: Any) -> list[Any]:
        """See `World.gather_objects`."""
        self._compare("gather_objects")
        return super().gather_objects(value)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """See `World.broadcast`."""
        self._compare(f"broadcast from {source}")
        return super().broadcast(value, source)

    def broadcast_tensor(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """See `World.broadcast_tensor`."""
        self._compare(f"broadcast_tensor from {source}", tensor)
        return super().broadcast_tensor(tensor, source)
