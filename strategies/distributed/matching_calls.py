"""Calls that all processes must make, such as a save. If only some processes make a call, an error is raised.

Every process announces in torch's store that it has entered the call, and waits there for the other processes. It waits
until all have arrived, until one of them can no longer arrive, or until the timeout. A process can no longer arrive if
it has entered a different call or has ended. It also cannot arrive if it has continued to a later training step
or exchange, where it waits for this process. This case is detected only among processes of the same machine.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import time
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ...common.messages import warn
from ..processes import identify_host

if TYPE_CHECKING:
    from .world import World

_FIRST_LOOK = 2.0  # seconds after which a waiting process examines what delays the others
_STANDING = 3.0  # seconds without progress after which a rank that has continued counts as waiting
_FIRST_WORD = 60.0  # seconds of waiting before the warning
_MOST_LOOKED_AT = 64  # ranks that each waiting process examines, besides those on its machine


class SharedCount:
    """Counter of training steps and exchanges, which other processes of this machine can read at any time.

    On systems other than Linux, the counter is private.

    Attributes:
        values: The counter, as a sequence of one number.
        place: Path from which other processes read the counter; "" if they cannot read it.
        pid: ID of the process that created the counter.
    """

    def __init__(self) -> None:
        self.values: Any = [0]
        self.place = ""
        self.pid = os.getpid()
        with contextlib.suppress(AttributeError, OSError):
            descriptor = os.memfd_create("treadle")
            os.ftruncate(descriptor, 8)
            self.values = memoryview(mmap.mmap(descriptor, 8)).cast("q")
            self.place = f"/proc/{self.pid}/fd/{descriptor}"

    def advance(self) -> None:
        """Increment the counter. Must be called when this process enters a training step or an exchange."""
        self.values[0] += 1


_count: list[SharedCount] = []


def shared_count() -> SharedCount:
    """Return this process's `SharedCount`."""
    if not _count or _count[0].pid != os.getpid():
        _count[:] = [SharedCount()]
    return _count[0]


def _read(place: str) -> int | None:
    """Return another process's counter; None if that process has ended."""
    try:
        with open(place, "rb") as file:
            return int.from_bytes(file.read(8), "little", signed=True)
    except FileNotFoundError:
        return None


class Arrivals:
    """Announcements of calls that all processes of a process group must make."""

    def __init__(self, store: dist.Store, rank: int, size: int, local_size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._seconds = timeout.total_seconds()
        first = rank - rank % local_size
        self._near = {*range(min(size, _MOST_LOOKED_AT)), *range(first, min(size, first + local_size))} - {rank}
        self._count = shared_count()
        # The last call: its number, and the count at that time.
        self._number, self._before = 0, int(self._count.values[0])
        self._host = identify_host()
        self._announce("")
        self._store.set(f"place of {rank}", json.dumps([self._host, self._count.place]))
        atexit.register(self.leave)

    def leave(self) -> None:
        """Record in the store that this process is ending, so that other ranks do not wait for it."""
        if os.getpid() == self._count.pid:
            with contextlib.suppress(RuntimeError):  # the store may have ended with its process
                self._store.set(f"{self._rank} has ended", "")

    def meet(self, call: str) -> None:
        """Announce that this process has entered ``call``, and wait until all processes have entered it.

        Raises:
            RuntimeError: If another process does not arrive.
        """
        moved = int(self._count.values[0]) - self._before
        self._number += 1
        arrived = f"{self._number} {call}"
        try:
            self._announce(call)
            if self._store.add(arrived, 1) < self._size:
                self._wait(call, arrived, moved)
        except dist.DistNetworkError as error:
            raise RuntimeError(
                f"{call} needs all processes, but the process that hosts the run's store, usually rank 0, has ended "
                f"({error})."
            ) from None
        except BaseException:
            self._number -= 1  # the next call may be one that all ranks make
            with contextlib.suppress(RuntimeError):
                self._store.add(arrived, -1)
                self._announce("")
            raise
        self._before += moved

    def _announce(self, call: str) -> None:
        count = int(self._count.values[0])
        self._store.set(f"call of {self._rank}", json.dumps([self._number, call, count]))

    def _wait(self, call: str, arrived: str, moved: int) -> None:
        start_time = time.monotonic()
        next_look, warned, pause = start_time + _FIRST_LOOK, False, 0.0005
        standing: dict[int, tuple[int, float]] = {}
        while self._store.add(arrived, 0) < self._size:
            current_time = time.monotonic()
            if current_time >= next_look or current_time >= start_time + self._seconds:
                timed_out = current_time >= start_time + self._seconds
                missing = self._find_missing(
                    range(self._size) if timed_out else sorted(self._near), call, moved, standing
                )
                if any(missing.values()) or timed_out:
                    raise RuntimeError(self._describe_missing(call, missing, current_time - start_time))
                if missing and not warned and current_time >= start_time + _FIRST_WORD:
                    warned = True
                    warn(f"{call} has waited {current_time - start_time:.0f} s for {_name_ranks(missing)} to call it.")
                next_look = current_time + 1.0
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05 + self._size / 5000)

    def _find_missing(
        self, ranks: Iterable[int], call: str, moved: int, standing: dict[int, tuple[int, float]]
    ) -> dict[int, str]:
        """Return the missing ranks, each with the reason why it cannot arrive, or "" if it may still arrive."""
        missing = {}
        for rank in ranks:
            if rank == self._rank:
                continue
            announcement = self._get(f"call of {rank}")
            number, other, count = announcement or (-1, "", 0)
            if (number, other) != (self._number, call):
                if number == self._number and other:
                    missing[rank] = f"called {other}"
                elif self._store.check([f"{rank} has ended"]):
                    missing[rank] = "ended"
                else:
                    missing[rank] = self._explain_absence(rank, count + moved, standing) if announcement else ""
        return missing

    def _explain_absence(self, rank: int, expected: int, standing: dict[int, tuple[int, float]]) -> str:
        """Return why a rank of this machine can no longer arrive; "" if it may still arrive or its state is unknown."""
        host, place = self._get(f"place of {rank}") or ("", "")
        if not place or host != self._host:
            return ""
        try:
            count = _read(place)
        except OSError:  # this user may not read it
            return ""
        if count is None:
            return "ended"
        if count <= expected:
            return ""
        current_time = time.monotonic()
        if standing.get(rank, (None, 0.0))[0] != count:
            standing[rank] = count, current_time
        return "continued to a later step or exchange" if current_time - standing[rank][1] >= _STANDING else ""

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _describe_missing(self, call: str, missing: dict[int, str], seconds: float) -> str:
        arrived_ranks = [
            rank for rank in range(self._size) if rank not in missing and (rank in self._near or rank == self._rank)
        ]
        ranks_by_reason: dict[str, list[int]] = {}
        for rank, reason in missing.items():
            ranks_by_reason.setdefault(reason or f"did not call it within {seconds:.0f} s", []).append(rank)
        reasons = "; ".join(f"{_name_ranks(ranks)} {reason}" for reason, ranks in ranks_by_reason.items())
        return (
            f"{call} needs all processes, but {_name_ranks(arrived_ranks)} called it and {reasons}. Call it on every "
            "rank, not under `if trainer.is_global_zero:` or `if accelerator.is_main_process:`. Each file is still "
            "written only once."
        )


_current: list[tuple[weakref.ref[Any], int, Arrivals]] = []


def arrivals_of(world: World) -> Arrivals:
    """Return the `Arrivals` of torch's current process group, which all worlds over the group share."""
    group, pid = dist.group.WORLD, os.getpid()
    if not _current or _current[0][0]() is not group or _current[0][1] != pid:  # a group may be created again
        forget_arrivals()
        # Private, but present in torch from 1.x to 2.13: the store that the group was created with.
        store = dist.PrefixStore("treadle arrivals", dist.distributed_c10d._get_default_store())
        arrivals = Arrivals(store, world.rank, world.size, world.local_size, world.timeout)
        # No reference to the group, because its end frees a rank that waits in it, and comes with the last reference.
        _current.append((weakref.ref(group), pid, arrivals))
    return _current[0][2]


def forget_arrivals() -> None:
    """Release the store of the announcements, because the process group ends."""
    for *_, earlier in _current:
        atexit.unregister(earlier.leave)
    _current.clear()


def _name_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as ``rank 3`` or ``ranks 0, 1``. The ranks after the first eight are only counted."""
    listed = list(ranks)
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed[:8]))}{more}"
