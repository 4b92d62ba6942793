"""Detection of the calls in which ranks wait for each other, and of calls that do not match."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ...common.messages import group_ranks
from .tracebacks import find_owner

WAITING_FILES = (
    "/torch/distributed/",
    "/torch/autograd/graph.py",
    "/torch/nn/parallel/distributed.py",
    "/strategies/distributed/",
    "/engine/preemption/",
)
# Ranks connect, restart after a failure, or leave: these waits have their own rules and limits.
_OTHER_RULES = ("/engine/preemption/", "/process_group.py", "/retry.py")
_WRAPPERS = "c10d_logger.py"  # wrapper of torch's functions, each of which is called `wrapper` there
_PAIRWISE = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"}
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_WORLDS = (f"{__package__}.world", __name__, "contextlib")
# Often written in two branches: `if main: prepare(); wait() else: wait()`, or one branch sends and the other receives.
_IN_TWO_BRANCHES = ("barrier", "broadcast", "broadcast_tensor")
_ADVICE = (
    "All ranks must make the same calls in the same order. Look for a call under a condition that holds only on some "
    "ranks, such as `if trainer.is_global_zero:` or `if accelerator.is_main_process:`, and call it on every rank."
)


class DistributedOperationException(RuntimeError):
    """Error raised if collective calls of the processes do not match, or if they cannot be compared.

    Examples:
        >>> from treadle.strategies import DistributedOperationException
        >>> issubclass(DistributedOperationException, RuntimeError)
        True
    """


@dataclass(frozen=True)
class WaitingCall:
    """Call in which a rank waits until all ranks have made it.

    Attributes:
        kind: Kind of the call, which is equal on all ranks if their calls match; "" if unknown.
        words: Text that names the call and the line of the user's code.
    """

    kind: str
    words: str


def is_users(frame: FrameType) -> bool:
    """Return whether a frame belongs to the user's code, and not to a library."""
    return not frame.f_code.co_filename.startswith((*_LIBRARIES, "<")) and find_owner(frame) is None


def is_waiting(frames: Sequence[FrameType]) -> bool:
    """Return whether a thread with these frames, outermost first, waits for other ranks."""
    if not frames or find_owner(frames[-1]) is None:  # a user's folder may be called strategies/distributed, too
        return False
    file = frames[-1].f_code.co_filename.replace(os.sep, "/")
    return any(part in file for part in WAITING_FILES)


def find_waiting_call(frames: Sequence[FrameType]) -> WaitingCall | None:
    """Return the call in which a thread with these frames, outermost first, waits for other ranks; else None."""
    frames = [frame for frame in frames if not frame.f_code.co_filename.endswith(_WRAPPERS)]
    files = [frame.f_code.co_filename.replace(os.sep, "/") for frame in frames]
    if not is_waiting(frames):
        return None
    user = max((n for n, frame in enumerate(frames) if is_users(frame)), default=-1)
    number = next(n for n in range(user + 1, len(files)) if any(part in files[n] for part in WAITING_FILES))
    names = [frame.f_code.co_name for frame in frames[number:]]
    operation = "backward" if files[number].endswith("/torch/autograd/graph.py") else names[0]
    words = operation + (_describe_user_call(frames[user:], operation) if user >= 0 else "")
    if not _PAIRWISE.isdisjoint(names) or any(part in file for part in _OTHER_RULES for file in files):
        return WaitingCall("", words)
    caller = frames[number - 1] if number and operation != "backward" else None
    return WaitingCall(f"{operation} {_name_caller(caller)}", words)


def _name_caller(frame: FrameType | None) -> str:
    """Return the qualified name of the frame's function if it belongs to Treadle or torch, else "".

    Other functions are not compared, because ranks may make the same exchange in different functions.
    """
    return "" if frame is None or find_owner(frame) is None else frame.f_code.co_qualname


def _describe_user_call(frames: Sequence[FrameType], operation: str) -> str:
    called = frames[1].f_code.co_name
    place = f"at {frames[0].f_code.co_filename}:{frames[0].f_lineno}"
    return f" {place}" if called == operation else f" in {called} {place}"


def mark_exchange() -> tuple[str, str]:
    """Return the name of the function that called a `World` collective, and a text with the user's call and line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _WORLDS:
        frame = frame.f_back
    kind, called = _name_caller(frame), ""
    while frame is not None and not is_users(frame):
        called = frame.f_code.co_name
        frame = frame.f_back
    return kind, f"{called or 'an exchange'} at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else called


def mark_call(operation: str) -> tuple[str, str]:
    """Return the same for a World collective in debug mode, where ``operation`` and the user's line are compared too.

    The folder of the user's file is not compared, because it may differ between machines.
    """
    kind, words = mark_exchange()
    line = "" if operation.split()[0] in _IN_TWO_BRANCHES else Path(words).name
    return f"{operation} {kind} {line}", f"{operation} in {words}"


def check_marks(marks: Mapping[int, tuple[str, str]]) -> None:
    """Check that the ranks that take part in an exchange made the same call.

    ``marks`` maps each rank to its result of `mark_exchange`.

    Raises:
        DistributedOperationException: If the calls differ.
    """
    if len({kind for kind, _ in marks.values()}) > 1:
        lines = _list_calls({rank: words for rank, (_, words) in marks.items()})
        raise DistributedOperationException(f"the ranks make calls that do not match:\n{lines}\n{_ADVICE}")


def describe_mismatch(calls: Mapping[int, WaitingCall]) -> str:
    """Describe the calls in which all ranks wait if these cannot match; return "" if they may match."""
    kinds = {call.kind for call in calls.values()}
    if len(kinds) < 2 or "" in kinds:
        return ""
    return describe_calls_that_differ({rank: call.words for rank, call in calls.items()})


def describe_calls_that_differ(words: Mapping[int, str]) -> str:
    """Return the message about ranks that wait in different calls, which ``words`` describes by rank."""
    lines = _list_calls(words)
    return f"the ranks wait in calls that do not match, so none of these calls can end:\n{lines}\n{_ADVICE}"


def _list_calls(words: Mapping[int, str]) -> str:
    return "\n".join(f"  {ranks}: {text}" for text, ranks in group_ranks(words).items())
