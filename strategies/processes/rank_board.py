"""Record in which a rank reports its state to Treadle's supervisor, if it has one; see `launch.rank_board`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any

VARIABLE = "TREADLE_BOARD"
BOARD_RECORD = 4096  # bytes for each rank


_running: list[int] = []  # contains this process while a stage runs in it
_signaled: list[int] = []  # contains this process once it has received a signal


def mark_stage(running: bool, exiting: bool = False) -> None:
    """Report to the supervisor that a stage runs or has ended. Exiting during a stage counts as a failure.

    ``exiting`` means that ``sys.exit(0)`` has ended the stage, which is the cause if another rank fails in its stage.
    """
    _running[:] = [os.getpid()] if running else []
    if running:
        _signaled.clear()
    _write(0, b"\1" if running else b"\3" if exiting else b"\0")


def mark_leaving() -> None:
    """Report to the supervisor that this rank has noted a signal and is leaving because of it.

    Signal handlers may call this.
    """
    _signaled[:] = [os.getpid()]
    _write(0, b"\2")


def is_stage_running() -> bool:
    """Return whether a stage runs in this process."""
    return _running == [os.getpid()]


def was_signaled() -> bool:
    """Return whether this process has noted a signal since its last stage began."""
    return _signaled == [os.getpid()]


def write_beat(beat: Mapping[str, Any] | None) -> None:
    """Report to the supervisor that this rank is alive.

    ``beat`` must be serializable as JSON, and must differ in each call. None means that no more heartbeats follow. Data
    that does not fit into the record is not sent.
    """
    text = b"" if beat is None else json.dumps(beat).encode()
    if len(text) < BOARD_RECORD:
        _write(1, text.ljust(BOARD_RECORD - 1, b"\0"))


def _write(offset: int, data: bytes) -> None:
    path, local_rank = os.environ.get(VARIABLE), os.environ.get("LOCAL_RANK", "")
    if not path or not local_rank.isdecimal():
        return
    with contextlib.suppress(OSError):  # a program that outlives the supervisor, or that runs in another container
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(descriptor, data, int(local_rank) * BOARD_RECORD + offset)
        finally:
            os.close(descriptor)
