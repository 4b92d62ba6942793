"""Planned failure: a point in a run and an action."""

from __future__ import annotations

import builtins
import dataclasses
import errno
import functools
import os
import signal
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ..common.messages import nearest
from ..common.validation import check_int
from .places import POINTS


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
