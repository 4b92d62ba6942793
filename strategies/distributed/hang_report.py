"""Report of a run that makes no progress: which rank hangs, why and where, with the stacks of all ranks in files.

The ranks exchange it through the store. A rank writes its stacks and answers an alarm within a second. One rank then
prints the report, which blames the ranks that do not answer: they are stopped, or blocked in C code that holds the GIL.
If all ranks answer, it blames the furthest behind of those that do not wait for other ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ...common.messages import write_stderr
from ..processes import Dumps, explain_silence, fetch_stacks, format_stack, identify_host, is_alive
from .tracebacks import silence_uncaught
from .training_clock import TrainingClock, progress
from .waiting_call import is_waiting

_ANSWER = 1.0  # seconds within which the ranks have to answer an alarm
_PRINTING = 2.0  # seconds that the other ranks wait for the report
LONGEST = _ANSWER + _PRINTING + 2.0  # seconds after an alarm within which every rank has ended or continues


class RankMessages:
    """Messages of the ranks in the store: heartbeats, and the ends of processes.

    Attributes:
        store: The store, or None with a world size of one.
        answered_at: Time of the store's last answer; infinite after the store has ended.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.host = identify_host()
        self.answered_at = time.monotonic()

    def read(self, key: str, seconds: float = 0.0) -> str | None:
        """Return a value, or None if it is not set within some seconds. `Store.get` would wait for the timeout."""
        end = time.monotonic() + seconds
        while not self.store.check([key]):
            if time.monotonic() >= end:
                return None
            time.sleep(0.01)
        return str(self.store.get(key).decode())

    def read_beat(self, rank: int) -> dict[str, Any] | None:
        """Return the last heartbeat of a rank, or None before its first."""
        beat = self.read(f"beat of {rank}")
        return None if beat is None else dict(json.loads(beat))

    def find_pid(self, rank: int) -> int | None:
        """Return the process ID of a rank of this machine; None for any other rank, or before its first heartbeat."""
        beat = self.read_beat(rank)
        return beat["pid"] if beat is not None and beat["host"] == self.host else None

    def note_first_end(self, rank: int) -> None:
        """Record that a rank has ended, unless another rank has ended earlier."""
        self.store.compare_set("ended first", "", str(rank))

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank has reported its end, or was a process of this machine that no longer exists."""
        if self.store.check([f"{rank} has ended"]):
            return True
        pid = self.find_pid(rank)
        return pid is not None and not is_alive(pid)

    def is_lost(self, rank: int) -> bool:
        """Return whether a rank of this machine has ended without a report, as after `os._exit`."""
        return self.has_ended(rank) and not self.store.check([f"{rank} has ended"])


@dataclass
class Verdict:
    """Outcome of an alarm on which the run ends.

    Attributes:
        silent: Ranks that did not answer the alarm.
        blamed: Ranks that hang.
        failed: Whether the run ends as after an error: a rank was lost, or the calls of the ranks do not match.
    """

    silent: list[int]
    blamed: list[int]
    failed: bool


class HangReport:
    """Report of the ranks on an alarm, as one rank contributes to it.

    Attributes:
        dumps: File to which a signal handler writes this process's stack.
        find_directory: Function that returns the directory of the run; None means the working directory.
    """

    def __init__(self, clock: TrainingClock, messages: RankMessages) -> None:
        self.clock, self.messages = clock, messages
        self.find_directory: Callable[[], Any] = lambda: None
        self.dumps = Dumps()
        self._round = 0  # number of alarms after which the run has continued
        self._beats = 0

    def make_beat(self) -> dict[str, Any]:
        """Return a heartbeat, which differs from each earlier one."""
        self._beats += 1
        return {
            "number": self._beats,
            "rank": self.messages.rank,
            "limit": self.clock.limit,
            "host": self.messages.host,
            "pid": os.getpid(),
            "dumps": self.dumps.path,
            "where": self.clock.describe(),
            "progress": progress.measure(),
            "still": self.clock.measure_stillness(),
            "directory": str(self._resolve("")),
        }

    def write_own_stacks(self, folder_name: str = "") -> Path:
        """Write the stacks of all threads of this process into a folder of the run, and return the folder."""
        folder = self._resolve(folder_name or _name_folder())
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        text = "\n".join(
            f"{names.get(ident, 'a thread of C code')}:\n{format_stack(ident)}"
            for ident in sys._current_frames()
            if ident != threading.get_ident()
        )
        with contextlib.suppress(OSError):  # the disk may be what hangs, or it may be full
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"rank-{self.messages.rank}.txt").write_text(text)
        return folder

    def _resolve(self, folder_name: str) -> Path:
        return Path(self.find_directory() or ".", folder_name).absolute()

    def note_mismatch(self, mismatch: str) -> None:
        """Record the calls that do not match, before the alarm is raised."""
        # Sending the report may make a rank seem busy again.
        self.messages.store.set(f"mismatch {self._round}", mismatch)

    def is_requested(self) -> bool:
        """Return whether a rank has raised the alarm and answers it."""
        return bool(self.messages.store.check([f"alarm {self._round}"]))

    def answer(self, alarmed: bool) -> Verdict | None:
        """Answer an alarm, which this rank has raised itself if ``alarmed`` is set.

        Returns:
            The verdict; None if the run continues, because a rank has made progress since the alarm.
        """
        store, rank, number = self.messages.store, self.messages.rank, self._round
        if store.add(f"alarms {number}", 1) == 1:
            store.set(f"alarm {number}", _name_folder())
        folder_name = store.get(f"alarm {number}").decode()
        frames = self.clock.collect_frames()
        stillness = self.clock.measure_stillness()
        # The clock may have seen a last sign of progress before this alarm, or the rank has continued since then.
        moved = alarmed and self.clock.has_moved(frames)
        self.write_own_stacks(folder_name)
        entries = [is_waiting(frames), moved, progress.entered, self.clock.describe(frames), stillness]
        del frames
        store.set(f"answer {number} of {rank}", json.dumps(entries))
        answers = self._collect_answers()
        self.messages.answered_at = time.monotonic()
        if store.add(f"reporters {number}", 1) == 1:
            self._print(answers, folder_name)
        if self.messages.read(f"report {number}", _PRINTING) == "go on":
            self._round += 1
            return None
        silence_uncaught()  # the end of the others will raise an error here
        failed = bool(self._find_lost(answers) or self.messages.read(f"mismatch {number}"))
        return Verdict([rank for rank, answer in answers.items() if answer is None], self._blame(answers), failed)

    def _collect_answers(self) -> dict[int, Any]:
        """Return the answers by rank; None for a silent rank. Ranks that ended without an answer are omitted."""
        answers: dict[int, Any] = dict.fromkeys(range(self.messages.size))
        end = time.monotonic() + _ANSWER
        while True:
            for rank in [rank for rank, answer in answers.items() if answer is None]:
                ended = self.messages.has_ended(rank)  # in this order, because a rank may answer and then end
                if (answer := self.messages.read(f"answer {self._round} of {rank}")) is not None:
                    answers[rank] = json.loads(answer)
                elif ended:
                    del answers[rank]
            if None not in answers.values() or time.monotonic() >= end:
                return answers
            time.sleep(0.02)

    def _blame(self, answers: dict[int, Any]) -> list[int]:
        """Return the silent ranks. If there are none, return the furthest behind of the ranks that do not wait."""
        if silent := [rank for rank, answer in answers.items() if answer is None]:
            return silent
        busy = {rank: count for rank, (waiting, _, count, *_) in answers.items() if not waiting}
        return [rank for rank, count in busy.items() if count == min(busy.values())]

    def _find_lost(self, answers: dict[int, Any]) -> list[int]:
        return [rank for rank in range(self.messages.size) if rank not in answers and self.messages.is_lost(rank)]

    def _print(self, answers: dict[int, Any], folder_name: str) -> None:
        goes_on = None not in answers.values() and any(moved for _, moved, *_ in answers.values())
        if not goes_on:
            lost = self._find_lost(answers)
            mismatch = None if lost else self.messages.read(f"mismatch {self._round}")
            text = mismatch or self._describe(answers, lost, folder_name)
            write_stderr(f"{text}\nstacks of all ranks: {self._resolve(folder_name)}")
        self.messages.store.set(f"report {self._round}", "go on" if goes_on else "end")

    def _describe(self, answers: dict[int, Any], lost: list[int], folder_name: str) -> str:
        size, stillness = self.messages.size, f"{self.clock.limit:g} s"
        blamed = [] if lost else self._blame(answers)
        lines = [
            f"rank {rank} of {size} ended first, without a Python error: it was killed by a signal, or exited "
            "through os._exit"
            for rank in lost
        ]
        for rank in blamed:
            if answers[rank] is None:
                condition, where = self._explain_silence(rank, folder_name)
                lines.append(f"rank {rank} of {size} {condition}; {where}")
            else:
                lines.append(f"rank {rank} of {size} has made no progress for {stillness}: {answers[rank][3]}")
        if not blamed and not lost:
            lines.append(f"all ranks have waited for each other for {stillness}, in calls that do not match")
        for rank, answer in answers.items():
            if rank not in blamed and answer is not None:
                lines.append(f"rank {rank} {'waits' if answer[0] else 'is'} {answer[3]}")
        return "\n".join(lines)

    def _explain_silence(self, rank: int, folder_name: str) -> tuple[str, str]:
        """Return why and where a silent rank is stuck. If it is on this machine, make it write its stack."""
        beat = self.messages.read_beat(rank)
        if beat is None:
            return "has never responded", "it hangs while starting"
        near, pid = beat["host"] == self.messages.host, beat["pid"]
        condition = f"(process {pid}) {explain_silence(pid if near else None)}"
        file = self._resolve(folder_name) / f"rank-{rank}.txt"
        return condition, f"last seen {beat['where']}{fetch_stacks(pid, beat['dumps'], file) if near else ''}"


def _name_folder() -> str:
    return f"stacks-{datetime.now():%Y%m%d-%H%M%S}"
