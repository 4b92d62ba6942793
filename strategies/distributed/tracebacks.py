"""Short reports of uncaught errors: printed once per job, with framework frames counted instead of listed.

The errors keep their type, their identity and their full traceback for ``except``, debuggers and ``pdb.pm()``. Only the
printed text changes:

- In a script, the interpreter prints errors through ``sys.excepthook``. Treadle's hook replaces Python's default, or
  the hook that torch installs with each process group, but not a hook that the user has set. It is installed with the
  first Trainer or Accelerator, and when processes connect. With a world size of one, errors without a frame of Treadle
  are passed on to the previous hook.
- pytest, IPython and notebooks omit frames that have a local variable ``__tracebackhide__``. `hide_frames` sets it in
  framework frames.

``TREADLE_FULL_TRACEBACK=1`` disables both changes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

from ...common.messages import read_text
from ..processes import identify_host, is_alive, leave_on_sigterm, read_start_time, was_signaled

VARIABLE = "TREADLE_FULL_TRACEBACK"
PATIENCE = 3.0  # seconds that a rank waits for another's report; the launcher ends a job some seconds after a failure
_POLL = 0.3  # seconds; torchrun checks its ranks every 0.1 s, and names the first that it finds ended
_PACKAGE = __name__.partition(".")[0]
_FRAMEWORKS = (_PACKAGE, "torch", "contextlib", "runpy")
_TORCHS_HOOK = "torch.distributed.distributed_c10d"


class PeerFailed(RuntimeError):
    """Error raised because another rank has failed. The message names that rank and, if known, its error."""


_LOST = re.compile(r"Connection (closed|reset) by peer|Broken pipe|remote process exited|Socket closed", re.IGNORECASE)


def is_consequence(error: BaseException) -> bool:
    """Return whether an error seems to be a consequence of another rank's failure."""
    return any(
        isinstance(link, PeerFailed) or (isinstance(link, RuntimeError) and _LOST.search(read_text(link)) is not None)
        for link in _collect_links(error)
    )


_told = threading.Event()  # set if the watchdog has reported why the run ends


def silence_uncaught() -> None:
    """Stop printing uncaught errors, because the watchdog has reported why the run ends."""
    _told.set()


def report_uncaught(store: Any = None, rank: int = 0, size: int = 1) -> None:
    """Install a hook that prints uncaught errors in a short form.

    With ``store``, an error that several ranks raise is printed on only one of them. Does nothing if the user has
    replaced ``sys.excepthook``, or if ``TREADLE_FULL_TRACEBACK=1`` is set.

    Args:
        store: Store through which the ranks exchange their errors. Default: None, which means that each rank
            prints its own errors.
        rank: The rank of this process.
        size: The world size.
    """
    if isinstance(sys.excepthook, Uncaught):
        if store is None:
            return  # the hook of a process group knows more
        forget_store()
    hook = sys.excepthook
    standard = hook is sys.__excepthook__ or getattr(hook, "__module__", "") == _TORCHS_HOOK
    if standard and not is_full():
        sys.excepthook = Uncaught(hook, store, rank, size)


def forget_store() -> None:
    """Remove Treadle's hook and release its store."""
    if isinstance(sys.excepthook, Uncaught):
        sys.excepthook = sys.excepthook.previous


def is_full() -> bool:
    """Return whether ``TREADLE_FULL_TRACEBACK`` requests all frames on every rank."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def is_agent_store() -> bool:
    """Return whether the launcher hosts the store of the run."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class Uncaught:
    """Hook for ``sys.excepthook`` that prints an error in a short form and, if possible, on one rank only.

    The other ranks wait at most a few seconds until that rank has printed its error, because launchers end a job as
    soon as one rank has ended.
    """

    def __init__(self, previous: Callable[..., Any], store: Any, rank: int, size: int) -> None:
        self.previous = previous
        self.store = store
        self.rank = rank
        self.size = size
        self._supervised = "TREADLE_SUPERVISOR" in os.environ
        self._gone = ""  # the ranks that have ended without an error, in words
        if store is not None:
            store.set(f"process of {rank}", json.dumps([identify_host(), os.getpid(), read_start_time(os.getpid())]))

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print an uncaught error, unless another rank has reported it."""
        if self.size == 1 and _PACKAGE not in _map_owners(error, trace).values():
            self.previous(kind, error, trace)
            return
        leave_on_sigterm()
        if self._supervised and was_signaled() and is_consequence(error):
            return  # Treadle's supervisor ends this rank because of another one, which it names
        if _told.is_set():
            time.sleep(PATIENCE)
            return
        words = f"{kind.__qualname__}: {read_text(error)}"
        earlier = self._find_earlier_report(error, words)
        if earlier is None:
            _write(self._gone + format_error(error, trace) + self._format_rank(error))
            if self._gone and not self._supervised:
                time.sleep(_POLL)
            if self.store is not None:
                with contextlib.suppress(RuntimeError):  # the rank that held the store has ended, so none waits
                    self.store.set("reported", "1")
            return
        if earlier["words"] != words and (is_full() or not is_consequence(error)):
            _write(f"rank {self.rank} of {self.size}: {words.splitlines()[0]}\n")
        self._await_reporter_exit(earlier)

    def _format_rank(self, error: BaseException) -> str:
        rank = f"rank {self.rank} of {self.size}"
        is_named = self.size == 1 or any(rank in note for note in getattr(error, "__notes__", ()))
        return "" if is_named else f"on {rank}\n"

    def _find_earlier_report(self, error: BaseException, words: str) -> dict[str, Any] | None:
        """Return the report of another rank, or None if this rank has to report."""
        if self.store is None:
            return None
        reports: list[dict[str, Any] | None] = []
        # In a thread, because a store whose machine is unreachable may never answer.
        asking = threading.Thread(target=lambda: reports.append(self._claim(error, words)), daemon=True)
        asking.start()
        asking.join(2 * PATIENCE + 1)
        return reports[0] if reports else None

    def _claim(self, error: BaseException, words: str) -> dict[str, Any] | None:
        assert self.store is not None
        patience = timedelta(seconds=PATIENCE)
        try:
            if is_consequence(error):
                self._gone = self._await_cause()
            if self.store.add("errors", 1) == 1:
                self.store.set("error", json.dumps({"words": words, "host": socket.gethostname(), "pid": os.getpid()}))
                return None
            self.store.wait(["error", "reported"], patience)
            return dict(json.loads(self.store.get("error")))
        except RuntimeError:
            self.store = None  # torch prints a long warning for each further request
            if is_consequence(error) and not is_agent_store() and not self._gone:
                self._gone = f"treadle: rank 0 of {self.size} ended first. It hosted the run's store\n"
            return None

    def _await_cause(self) -> str:
        """Wait for the report of the failed rank. Return a description of ranks that ended without a report, or ""."""
        assert self.store is not None
        end = time.monotonic() + PATIENCE
        while not self.store.check(["error"]):  # torch prints a warning if a wait times out
            late = time.monotonic() >= end
            # Treadle's supervisor names them with their exit status, unless it is 0.
            if (late or not self._supervised) and (gone := self._find_gone()):
                return "".join(
                    f"treadle: rank {rank} of {self.size} ended first, without a Python error: process {pid} was "
                    "killed by a signal, exited through os._exit or sys.exit, or reached the end of its script, "
                    "while this rank was in a call that needs all ranks\n"
                    for rank, pid in gone.items()
                )
            if late:
                break
            time.sleep(0.01)
        return ""

    def _find_gone(self) -> dict[int, int]:
        """Return the process IDs of this machine's ended ranks, keyed by rank."""
        assert self.store is not None
        gone = {}
        for rank in range(self.size):
            if self.store.check([key := f"process of {rank}"]):
                host, pid, began = json.loads(self.store.get(key))
                if host == identify_host() and read_start_time(pid) not in ("", began):
                    gone[rank] = pid
        return gone

    def _await_reporter_exit(self, earlier: dict[str, Any]) -> None:
        """Wait briefly for the reporting rank to end, so that the launcher reports it as the first failure."""
        end = time.monotonic() + PATIENCE
        while earlier["host"] == socket.gethostname() and is_alive(earlier["pid"]) and time.monotonic() < end:
            time.sleep(0.01)


def hide_frames(error: BaseException) -> None:
    """Hide framework frames from pytest, IPython and notebooks: those in an error's traceback and on the current stack.

    Does nothing with ``TREADLE_FULL_TRACEBACK=1``.
    """
    if is_full():
        return
    frames = [frame for link in _collect_links(error) for frame, _ in traceback.walk_tb(link.__traceback__)]
    for frame in itertools.chain(frames, (frame for frame, _ in traceback.walk_stack(None))):
        if find_owner(frame) is not None and frame.f_code.co_name != "<module>":
            frame.f_locals["__tracebackhide__"] = True


def format_error(error: BaseException, trace: TracebackType | None) -> str:
    """Format an error as Python prints it, with framework frames counted instead of shown.

    With ``TREADLE_FULL_TRACEBACK=1``, all frames are shown.
    """
    full = traceback.TracebackException(type(error), error, trace, compact=True)
    if not is_full():
        owners = _map_owners(error, trace)
        hint = itertools.chain([f" (set {VARIABLE}=1 to show all frames)"], itertools.repeat(""))
        for part in _iterate_parts(full):
            part.stack = _Folded(part.stack, owners, hint)
    return "".join(full.format())


class _Folded(traceback.StackSummary):
    """Stack summary whose formatted text counts framework frames instead of listing them."""

    def __init__(self, frames: traceback.StackSummary, owners: Mapping[str, str], hint: Iterator[str]) -> None:
        super().__init__(frames)
        self._owners = owners
        self._hint = hint

    def format(self, **options: Any) -> list[str]:
        lines: list[str] = []
        for folded, run in itertools.groupby(self, lambda frame: frame.filename in self._owners):
            frames = list(run)
            if folded:
                names = " and ".join(dict.fromkeys(self._owners[frame.filename] for frame in frames))
                many = f"{len(frames)} frame{'s' if len(frames) > 1 else ''} of {names}"
                lines.append(f"  ... {many}{next(self._hint)}\n")
            else:
                lines += traceback.StackSummary.from_list(frames).format(**options)
        return lines


def _iterate_parts(full: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield the `TracebackException` of an error, and those of its causes, contexts and grouped errors."""
    yield full
    for other in (full.__cause__, full.__context__, *(full.exceptions or ())):
        if other is not None:
            yield from _iterate_parts(other)


def _collect_links(error: BaseException) -> list[BaseException]:
    """Return an error with its causes, its contexts, and the errors in exception groups."""
    links: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is not None and not any(link is listed for listed in links):
            links.append(link)
            pending += [link.__cause__, link.__context__, *getattr(link, "exceptions", ())]
    return links


def _map_owners(error: BaseException, trace: TracebackType | None) -> dict[str, str]:
    """Map each file of a framework in the tracebacks to the framework's name."""
    traces = [trace, *(link.__traceback__ for link in _collect_links(error))]
    frames = (frame for tb in traces for frame, _ in traceback.walk_tb(tb))
    return {frame.f_code.co_filename: owner for frame in frames if (owner := find_owner(frame)) is not None}


def find_owner(frame: FrameType) -> str | None:
    """Return the name of the framework, such as torch, that a frame belongs to; None for any other frame."""
    name = frame.f_globals.get("__name__", "")
    if name == "__main__":  # run as python -m
        name = getattr(frame.f_globals.get("__spec__"), "name", "")
    root = str(name).partition(".")[0]
    return root if root in _FRAMEWORKS else None


def _write(text: str) -> None:
    # Ignored if there is no standard error, as in Python's own hook.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()
