"""Records that the ranks of a machine write for their supervisor: whether a stage runs, and heartbeats."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..processes import BOARD_RECORD, explain_silence, fetch_stacks

_MARGIN = 1.5  # seconds that the ranks have to notice it themselves, because they know more
_ABSENCE = 2.0  # seconds without a check after which this process was stopped itself, or its machine suspended


@dataclass
class _Pulse:
    """Last heartbeat of a rank, and the time of its arrival."""

    record: bytes
    since: float


class RankBoard:
    """Anonymous file in which each rank of this machine has a record that outlives the rank.

    A record shows whether a stage runs (`mark_stage`) or the rank is leaving (`mark_leaving`), and contains the last
    heartbeat from the rank's watchdog, if there is one.

    Attributes:
        path: Path to which the ranks write; "" on systems that do not support such files.
    """

    def __init__(self, nproc: int) -> None:
        self._nproc = nproc
        self._descriptor: int | None = None
        self._pulses: dict[int, _Pulse] = {}
        self._looked = 0.0
        self.path = ""
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("treadle ranks")
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            self.clear()

    def clear(self) -> None:
        """Clear all records before the ranks start or restart."""
        self._pulses.clear()
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.ftruncate(self._descriptor, self._nproc * BOARD_RECORD)

    def is_running(self, local_rank: int) -> bool:
        """Return whether a stage runs in a rank, or the rank is leaving because of a signal."""
        return self._read(local_rank)[:1] in (b"\1", b"\2")

    def has_exited(self, local_rank: int) -> bool:
        """Return whether ``sys.exit(0)`` has ended the stage of a rank."""
        return self._read(local_rank)[:1] == b"\3"

    def is_leaving(self, local_rank: int) -> bool:
        """Return whether a rank has noted a signal and is leaving because of it."""
        return self._read(local_rank)[:1] == b"\2"

    def find_silent(self, ended: Collection[int]) -> list[int]:
        """Return the remaining ranks if each of them has been silent for longer than its limit; else [].

        As long as one rank responds, it reports the silent ranks itself. ``ended`` holds the ranks that have ended.
        """
        now = time.monotonic()
        if now - self._looked > _ABSENCE:
            self._pulses.clear()
        self._looked = now
        ranks = [rank for rank in range(self._nproc) if rank not in ended]
        silent = []
        for rank in ranks:
            record = self._read(rank)
            pulse = self._pulses.get(rank)
            if pulse is None or pulse.record != record:
                self._pulses[rank] = _Pulse(record, now)
            elif (beat := _parse(record)) is not None and now - pulse.since > beat["limit"] + _MARGIN:
                silent.append(rank)
        return ranks if silent == ranks else []

    def report(self, local_rank: int, folder_name: str) -> str:
        """Describe why a rank is silent, and write its main thread's stack to a file in the folder ``folder_name``."""
        beat = _parse(self._read(local_rank))
        if beat is None:
            return "does not respond"
        folder = Path(beat["directory"], folder_name)
        reason = f"(process {beat['pid']}) {explain_silence(beat['pid'])}"
        place = ""
        with contextlib.suppress(OSError):  # the disk is full
            folder.mkdir(parents=True, exist_ok=True)
            place = fetch_stacks(beat["pid"], beat["dumps"], folder / f"rank-{beat['rank']}.txt")
        return f"{reason}; no other rank of this machine responds either; last seen {beat['where']}{place}"

    def _read(self, local_rank: int) -> bytes:
        if self._descriptor is None:
            return b""
        return os.pread(self._descriptor, BOARD_RECORD, local_rank * BOARD_RECORD)

    def close(self) -> None:
        """Close the file after the ranks have ended."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _parse(record: bytes) -> dict[str, Any] | None:
    """Return a rank's last heartbeat, or None if there is none or the rank is currently writing it."""
    try:
        return dict(json.loads(record[1:].rstrip(b"\0")))
    except ValueError:
        return None
