"""Watchdog that ends a run if a rank hangs for longer than a limit, and reports the rank, its phase and its step.

In each process, two daemon threads work independently of the training. With a world size of one, there is only the
clock.

- The clock reads the stack of the training thread once per period. The training thread is the main thread, unless a
  library such as Ray uses the main thread itself. If the stack, the count of steps and exchanges, and the position of
  the run all stay the same for the time of the limit, the clock raises the alarm.
- The exchange reports to the store once per period that this process is alive, and where it is. When a rank has raised
  the alarm, the exchange writes the stacks of this process to a file and records in the store whether this rank waits
  for others. A rank that has done nothing but wait in a collective for some seconds counts as stalled. If all ranks are
  stalled in calls that do not match, none of the calls can end. The run then ends immediately, with an error that lists
  the calls.

If no rank has made progress since the alarm, one rank prints a report. The report blames the ranks that do not answer
the alarm: they are stopped, or blocked in C code that holds the GIL. If all ranks answer, it blames the furthest behind
of those that do not wait for other ranks. Then all ranks exit: with status 1 if their calls do not match or a rank
ended suddenly, such as through `os._exit`, and otherwise with the status `HUNG`.

If the user has not set a limit, lack of progress raises an alarm only on ranks that wait for others, shortly before the
time limit of a collective. A rank that works alone may take longer, as long as no other rank waits for it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...common.messages import write_stderr
from ..processes import (
    Dumps,
    Idleness,
    Pulse,
    end_at_once,
    explain_silence,
    fetch_stacks,
    identify_host,
    is_alive,
    is_stage_running,
    limit_exit,
    postpone_exit_limit,
    read_start_time,
    run_briefly,
    scratch,
    write_beat,
)
from .tracebacks import find_owner, is_agent_store, silence_uncaught
from .waiting_call import (
    WAITING_FILES,
    WaitingCall,
    describe_calls_that_differ,
    describe_mismatch,
    find_waiting_call,
    is_users,
)

if TYPE_CHECKING:
    from .world import World

HUNG = 124  # the exit status of timeout(1)
_PERIOD = 1.0  # seconds; at most a fifth of the limit
_ANSWER = 1.0  # seconds within which the ranks have to answer an alarm
_FIRST = 10  # beats during which rank 0 is searched for on this machine
_HURRY = 0.02  # seconds
_REPORT = 2.0  # seconds that the other ranks wait for the report
_LOST = 2.0  # seconds without progress, after another rank has ended, after which a rank counts as waiting
_INTERRUPT = 2.0  # seconds within which the main thread has to notice an interrupt
_MOST_LOOKED_AT = 64  # ranks that each rank that waits for a meeting examines
_STALL = 8.0  # seconds of waiting after which a rank counts as stalled
_DEBUGGERS = ("bdb", "pdb")

_AT_END = WaitingCall("the end of the script", "has reached the end of the script")


class _Progress:
    """Counts of this process, by which other ranks see whether it is ahead of them.

    Attributes:
        entered: Number of training steps and collectives that this process has entered.
        meetings: Number of completed calls of `World.meet`, and ``entered`` at the last one.
    """

    def __init__(self) -> None:
        self.entered = 0
        self.meetings = (0, 0)

    def note_meeting(self) -> None:
        """Record that a call of `World.meet` is complete."""
        self.meetings = self.meetings[0] + 1, self.entered

    def measure(self) -> list[int]:
        """Return the number of meetings, and the steps and collectives since then: larger for a rank that is ahead."""
        number, entered = self.meetings
        return [number, self.entered - entered]


progress = _Progress()

_phases: dict[CodeType, str] = {}
_loops: set[CodeType] = set()


def name_phase(phase: str, *functions: Callable[..., Any], loop: bool = False) -> None:
    """Set the name of the phase in which ``functions`` of Treadle run.

    If ``loop`` is set, each hook or user function that ``functions`` call is a separate phase.
    """
    codes = [function.__code__ for function in functions]
    _phases.update(dict.fromkeys(codes, phase))
    _loops.update(codes if loop else ())


def stack_of(thread: threading.Thread) -> list[FrameType]:
    """Return the frames of a thread, outermost first, or an empty list if the thread has ended."""
    frame = sys._current_frames().get(thread.ident or 0) if thread.is_alive() else None
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def describe_phase(frames: Iterable[FrameType]) -> str:
    """Return the phase of a thread with these frames, outermost first; ``"script"`` outside of named phases."""
    phase, looping = "script", False
    for frame in frames:
        code = frame.f_code
        if code in _phases:
            phase = _phases[code]
        elif looping and (code.co_name.startswith("on_") or find_owner(frame) is None):
            phase = code.co_qualname
        looping = code in _loops
    return phase


def is_waiting(frames: list[FrameType]) -> bool:
    """Return whether a thread with these frames, outermost first, waits for other ranks."""
    file = frames[-1].f_code.co_filename.replace(os.sep, "/") if frames else ""
    return any(part in file for part in WAITING_FILES)


class Watchdog:
    """Watchdog of one process, which also observes other processes through the store.

    It raises the alarm if a rank makes no progress for ``limit`` seconds. If ``strict`` is not set, this applies only
    to ranks that wait for others.

    Attributes:
        thread: Thread that runs the training.
        awaits_others: Whether this process waits at its end until all other processes have ended.
        ended: The first rank that is known to have ended, or None.
        interruptible: Whether the exchange may send SIGTERM to the main thread after another rank has ended.
        interrupted: Whether the main thread has handled this SIGTERM.
    """

    def __init__(self, world: World, limit: float, strict: bool, store: dist.Store | None = None) -> None:
        self.rank, self.size = world.rank, world.size
        self.set_limit(limit, strict)
        self.thread = threading.current_thread()
        self.ended: int | None = None
        self.interruptible = self.interrupted = False
        self._interrupted_at = math.inf
        self._periodic: Callable[[dist.Store], bool] = lambda store: False
        self._periodic_count = 0
        self._owner: Callable[[], Any] = lambda: None
        self._locate: Callable[[Any], tuple[str, Any]] = lambda owner: ("", None)
        self._find_directory: Callable[[Any], Any] = str
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._alarmed = threading.Event()
        self._signature: Any = None
        self._since = time.monotonic()
        self._idleness = Idleness()
        self._stall: WaitingCall | None = None
        self._told: WaitingCall | None = None  # what the other ranks know of it
        self._stalled = 0  # number of stalled ranks
        self._leaving = False
        self._answered_at = time.monotonic()  # time of the store's last answer
        self._round = 0
        self._host = identify_host()
        self._dumps = Dumps()
        self._store_host: int | None = None  # the process of rank 0, if it holds the store and is on this machine
        self._beats = 0
        self._store: Any = store
        self._threads = [threading.Thread(target=self._run_clock, name="treadle watchdog", daemon=True)]
        if self._store is not None:
            self._threads.append(threading.Thread(target=self._exchange, name="treadle exchange", daemon=True))
        for thread in self._threads:
            thread.start()
        atexit.register(self.leave)

    def set_limit(self, limit: float, strict: bool) -> None:
        """Set the limit in seconds, and the ranks that it applies to; see `Watchdog`."""
        self.limit, self.strict, self.awaits_others = limit, strict, strict
        self.period = min(_PERIOD * max(1.0, self.size / 500), limit / 5)

    def follow(
        self, owner: Any, locate: Callable[[Any], tuple[str, Any]], find_directory: Callable[[Any], Any]
    ) -> None:
        """Include the run of ``owner`` in reports as long as ``owner`` exists.

        ``locate`` returns the position of the run as text, and a value that changes whenever the run makes progress.
        ``find_directory`` returns the directory of the run; None means the working directory.
        """
        self._owner, self._locate, self._find_directory = weakref.ref(owner), locate, find_directory

    def call_each_period(self, function: Callable[[dist.Store], bool]) -> int:
        """Call a function with the store once per period, in a thread, and again soon if the function returns True.

        The function replaces the previous one. All ranks must set their functions in the same order.

        Returns:
            The number of the function, which is the same on all ranks.
        """
        self._periodic = function
        self._periodic_count += 1
        return self._periodic_count

    def _ask_owner(self, question: Callable[[Any], Any]) -> Any:
        owner = self._owner()
        try:
            return owner and question(owner)
        except Exception:  # the main thread may be changing what is read
            return None

    # -- the clock -----------------------------------------------------------------------------------------------

    def _run_clock(self) -> None:
        woke = 0.0
        while not self._ended.wait(self.period if woke else 0):
            now = time.monotonic()
            if self.strict:  # the supervisor can notice that all ranks are stopped
                write_beat(self._make_beat())
            woke = woke or now
            if now - woke > 2 * self.period + 1.0:  # this process or its machine was stopped
                self._since = self._answered_at = now
            woke = now
            frames = stack_of(self.thread)
            signature = self._sign(frames)
            if signature != self._signature or not frames or _is_debugged(frames):
                self._signature, self._since = signature, now
            elif now - self._since >= self.limit and (self.strict or is_waiting(frames)):
                self._alarm()
            self._stall = self._find_stall(frames, now - self._since)
            if self._store is not None and now - self._answered_at > self.limit:
                self._leave_alone()
            del frames

    def _find_stall(self, frames: list[FrameType], seconds: float) -> WaitingCall | None:
        """Return the call in which this rank is stalled, or None if it is not stalled."""
        if self._leaving:
            return _AT_END
        if not seconds or min(self._idleness.measure(), seconds) < min(_STALL, 0.7 * self.limit):
            return None
        call = find_waiting_call(frames)
        place, _ = self._ask_owner(self._locate) or ("", None)
        details = ", ".join(filter(None, [describe_phase(frames), place]))
        return call and WaitingCall(call.kind, f"{call.words} ({details})")

    def _make_beat(self) -> dict[str, Any]:
        """Return a heartbeat, which differs from each earlier one."""
        self._beats += 1
        return {
            "number": self._beats,
            "rank": self.rank,
            "limit": self.limit,
            "host": self._host,
            "pid": self._pid,
            "dumps": self._dumps.path,
            "where": self._describe(stack_of(self.thread)),
            "progress": progress.measure(),
            "still": time.monotonic() - self._since,
            "directory": str(self._resolve("")),
        }

    def _sign(self, frames: list[FrameType]) -> Any:
        stack = [(id(frame.f_code), frame.f_lasti) for frame in frames]
        return progress.entered, self._ask_owner(self._locate), stack

    def _alarm(self) -> None:
        if self._store is not None:
            self._alarmed.set()
            return
        folder = self._write_stacks(_name_folder(), self.rank)
        write_stderr(f"no progress for {self.limit:g} s: {self._describe(stack_of(self.thread))}; stacks: {folder}")
        end_at_once(HUNG)

    def _leave_alone(self) -> None:
        """End this process, because the store does not respond, so no other rank can be reached."""
        silence_uncaught()
        folder = self._write_stacks(_name_folder(), self.rank)
        host = "the launcher" if is_agent_store() else f"rank 0 of {self.size}"
        condition = f"has not responded for {self.limit:g} s and may be stopped"
        if self._store_host is not None and is_alive(self._store_host):  # retrieving its stacks would let it continue
            condition = f"(process {self._store_host}) {explain_silence(self._store_host)}"
        write_stderr(f"{host} {condition}. It hosts the run's store, so rank {self.rank} exits; stacks: {folder}")
        if self._store_host is not None and "TREADLE_SUPERVISOR" not in os.environ:
            _kill(self._store_host)
        end_at_once(HUNG)

    # -- the exchange --------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store's process has ended: the collectives will report it
            number, woke, neighbour, pulse = 0, time.monotonic(), (self.rank + 1) % self.size, Pulse()
            while not self._ended.is_set():
                # All ranks may have been stopped, and the neighbour may still be.
                if time.monotonic() - woke > 2 * self.period + 1.0:
                    pulse = Pulse()
                number, woke = number + 1, time.monotonic()
                self._store.set(f"beat of {self.rank}", json.dumps(self._make_beat()))
                silence = pulse.measure_silence(self._read_beat(neighbour))
                if silence > self.limit and not self._has_ended(neighbour):
                    self._alarmed.set()
                if self._is_lost(neighbour):
                    self._store.compare_set("ended first", "", str(neighbour))
                    if self._is_stuck():
                        self._alarmed.set()
                self._leave_if_alone()
                if self._store_host is None and number <= _FIRST and self.rank != 0 and not is_agent_store():
                    self._store_host = self._find_pid(0)
                if mismatch := self._find_mismatch() if self._tell_stall() else self._find_skipped_meeting():
                    # Sending the report may make a rank seem busy again.
                    self._store.set(f"mismatch {self._round}", mismatch)
                    self._alarmed.set()
                alarmed = self._store.check([f"alarm {self._round}"])
                self._answered_at = time.monotonic()
                if self._ended.is_set():  # `leave` sets `_alarmed` only to wake this thread
                    break
                if alarmed or self._alarmed.is_set():
                    self._answer()
                unfinished = self._periodic(self._store)
                self._alarmed.wait(_HURRY if unfinished else self.period)  # `leave` also sets it
            if not hasattr(sys, "last_value"):  # a rank that waits for this one from now on waits in vain
                self._leaving, self._stall = True, _AT_END
                self._tell_stall()
        self._answered_at = math.inf

    def _read_beat(self, rank: int) -> dict[str, Any] | None:
        beat = self._read(f"beat of {rank}")
        return None if beat is None else dict(json.loads(beat))

    def _find_pid(self, rank: int) -> int | None:
        """Return the process ID of a rank of this machine; None for any other rank, or before its first heartbeat."""
        beat = self._read_beat(rank)
        return beat["pid"] if beat is not None and beat["host"] == self._host else None

    def _has_ended(self, rank: int) -> bool:
        """Return whether a rank has reported its end, or was a process of this machine that no longer exists."""
        if self._store.check([f"{rank} has ended"]):
            return True
        pid = self._find_pid(rank)
        return pid is not None and not is_alive(pid)

    def _is_lost(self, rank: int) -> bool:
        """Return whether a rank of this machine has ended without a report, as after `os._exit`."""
        return self._has_ended(rank) and not self._store.check([f"{rank} has ended"])

    def _is_stuck(self) -> bool:
        """Return whether this rank must end itself after another rank has ended, because NCCL would let it wait."""
        if "TREADLE_SUPERVISOR" in os.environ:  # the supervisor names the rank that has ended, and ends this one
            return False
        waits = is_stage_running() or is_waiting(stack_of(self.thread))
        return waits and time.monotonic() - self._since >= _LOST

    def _leave_if_alone(self) -> None:
        """Interrupt the main thread or end the process, if another rank has ended and this rank cannot continue."""
        if self.ended is None and (rank := self._read("ended first")) is not None:
            self.ended = int(rank)
        if self.ended is None:
            return
        if not self.interruptible or self.interrupted:
            self._interrupted_at = math.inf
        else:
            self._interrupted_at = min(self._interrupted_at, time.monotonic())
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        overdue = time.monotonic() - self._interrupted_at > _INTERRUPT
        if overdue or (self._is_stuck() and self._store.check(["a rank has failed"])):
            write_stderr(
                f"rank {self.rank} of {self.size} exits in the middle of a step, because rank {self.ended} has ended"
            )
            end_at_once(1)

    def _tell_stall(self) -> bool:
        """Update the count of stalled ranks. Return whether all ranks are stalled, in calls not compared before."""
        stall, told, count = self._stall, self._told, self._stalled
        if stall is None and told is None:
            return False
        self._told = stall
        if stall is not None and stall != told:
            self._store.set(f"call of {self.rank}", json.dumps([stall.kind, stall.words]))
        self._stalled = self._store.add("stalled", (stall is not None) - (told is not None))
        return self._stalled == self.size and (count, told) != (self.size, stall)

    def _find_mismatch(self) -> str:
        """Describe the calls in which all ranks are stalled; return "" if they may match or not all are stalled."""
        if self._store.add("stalled", 0) < self.size:
            return ""
        calls = {rank: WaitingCall(*json.loads(self._store.get(f"call of {rank}"))) for rank in range(self.size)}
        return describe_mismatch(calls)

    def _find_skipped_meeting(self) -> str:
        """Describe the calls if this rank is stalled in `World.meet`, which another rank has passed by; else return "".

        The other rank may be in a collective of NCCL, in which it waits without a stack or idleness that shows it.
        """
        if self._told is None or not self._told.kind.startswith("meet "):
            return ""
        calls = {self.rank: self._told.words}
        for rank in range(min(self.size, _MOST_LOOKED_AT)):
            beat = self._read_beat(rank)
            if beat is not None and beat["progress"] > progress.measure() and beat["still"] >= _STALL:
                calls[rank] = f"has continued, and waits or works {beat['where']}"
        return describe_calls_that_differ(calls) if len(calls) > 1 else ""

    def _describe(self, frames: list[FrameType]) -> str:
        user = next(filter(is_users, reversed(frames)), None)
        line = f"{user.f_code.co_filename}:{user.f_lineno}" if user else ""
        place, _ = self._ask_owner(self._locate) or ("", None)
        return ", ".join(filter(None, [f"in {describe_phase(frames)}", place, line]))

    def _answer(self) -> None:
        store, rank = self._store, self.rank
        if store.add(f"alarms {self._round}", 1) == 1:
            store.set(f"alarm {self._round}", _name_folder())
        folder_name = store.get(f"alarm {self._round}").decode()
        frames = stack_of(self.thread)
        now = time.monotonic()
        # The clock may have seen a last sign of progress before this alarm, or the rank has continued since then.
        moved = self._alarmed.is_set() and self._sign(frames) != self._signature
        self._write_stacks(folder_name, rank)
        words = [is_waiting(frames), moved, progress.entered, self._describe(frames), now - self._since]
        del frames
        store.set(f"answer {self._round} of {rank}", json.dumps(words))
        answers = self._collect_answers()
        self._answered_at = time.monotonic()
        if store.add(f"reporters {self._round}", 1) == 1:
            self._report(answers, folder_name)
        if self._read(f"report {self._round}", _REPORT) == "go on":
            self._round += 1
            self._alarmed.clear()
            self._since = time.monotonic()
            return
        silence_uncaught()  # the end of the others will raise an error here
        self._end_silent(answers)
        if self._find_lost(answers) or self._read(f"mismatch {self._round}"):
            run_briefly(scratch.leave)
            time.sleep(0.3)  # each rank needs the store for this, and rank zero may hold it
            end_at_once(1)
        if rank not in self._blame(answers):
            run_briefly(scratch.leave)  # before the launcher notices it and ends this rank
            time.sleep(0.3)  # the rank that hangs leaves first
        end_at_once(HUNG)

    def _collect_answers(self) -> dict[int, Any]:
        """Return the answers by rank; None for a silent rank. Ranks that ended without an answer are omitted."""
        end = time.monotonic() + _ANSWER
        missing = list(range(self.size))
        while missing and time.monotonic() < end:
            time.sleep(0.02)
            missing = [
                rank
                for rank in missing
                if not self._store.check([f"answer {self._round} of {rank}"]) and not self._has_ended(rank)
            ]
        answers: dict[int, Any] = {}
        for rank in range(self.size):
            answer = self._read(f"answer {self._round} of {rank}")
            if answer is not None:
                answers[rank] = json.loads(answer)
            elif not self._has_ended(rank):
                answers[rank] = None
        return answers

    def _blame(self, answers: dict[int, Any]) -> list[int]:
        """Return the silent ranks. If there are none, return the furthest behind of the ranks that do not wait."""
        if silent := [rank for rank, answer in answers.items() if answer is None]:
            return silent
        busy = {rank: count for rank, (waiting, _, count, *_) in answers.items() if not waiting}
        return [rank for rank, count in busy.items() if count == min(busy.values())]

    def _find_lost(self, answers: dict[int, Any]) -> list[int]:
        return [rank for rank in range(self.size) if rank not in answers and self._is_lost(rank)]

    def _report(self, answers: dict[int, Any], folder_name: str) -> None:
        if None not in answers.values() and any(moved for _, moved, *_ in answers.values()):
            self._store.set(f"report {self._round}", "go on")
            return
        lost = self._find_lost(answers)
        mismatch = "" if lost else self._read(f"mismatch {self._round}")
        if mismatch:
            write_stderr(f"{mismatch}\nstacks of all ranks: {self._resolve(folder_name)}")
            self._store.set(f"report {self._round}", "end")
            return
        blamed = [] if lost else self._blame(answers)
        lines = [
            f"rank {rank} of {self.size} ended first, without a Python error: it was killed by a signal, or exited "
            "through os._exit"
            for rank in lost
        ]
        for rank in blamed:
            condition = f"has made no progress for {self.limit:g} s"
            where = answers[rank][3] if answers[rank] else ""
            if answers[rank] is None:
                condition, where = self._explain_silence(rank, folder_name)
            lines.append(f"rank {rank} of {self.size} {condition}{';' if answers[rank] is None else ':'} {where}")
        if not blamed and not lost:
            lines.append(f"all ranks have waited for each other for {self.limit:g} s, in calls that do not match")
        for rank, answer in answers.items():
            if rank not in blamed and answer is not None:
                lines.append(f"rank {rank} {'waits' if answer[0] else 'is'} {answer[3]}")
        write_stderr("\n".join([*lines, f"stacks of all ranks: {self._resolve(folder_name)}"]))
        self._store.set(f"report {self._round}", "end")

    def _explain_silence(self, rank: int, folder_name: str) -> tuple[str, str]:
        """Return why and where a silent rank is stuck. If it is on this machine, make it write its stack."""
        beat = self._read_beat(rank)
        if beat is None:
            return "has never responded", "it hangs while starting"
        near, pid = beat["host"] == self._host, beat["pid"]
        condition = f"(process {pid}) {explain_silence(pid if near else None)}"
        file = self._resolve(folder_name) / f"rank-{rank}.txt"
        return condition, f"last seen {beat['where']}{fetch_stacks(pid, beat['dumps'], file) if near else ''}"

    def _end_silent(self, answers: dict[int, Any]) -> None:
        """Kill the silent ranks of this machine, unless Treadle's supervisor will do so.

        Otherwise, torchrun would wait 30 s for them.
        """
        if "TREADLE_SUPERVISOR" in os.environ:
            return
        for rank in [rank for rank, answer in answers.items() if answer is None]:
            if (pid := self._find_pid(rank)) is not None and is_alive(pid):
                _kill(pid)

    def _read(self, key: str, seconds: float = 0.0) -> str | None:
        end = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() >= end:
                return None
            time.sleep(0.01)
        return self._store.get(key).decode()

    # -- the end -------------------------------------------------------------------------------------------------

    def _resolve(self, folder_name: str) -> Path:
        return Path(self._ask_owner(self._find_directory) or ".", folder_name).absolute()

    def _write_stacks(self, folder_name: str, rank: int) -> Path:
        folder = self._resolve(folder_name)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        text = "\n".join(
            f"{names.get(ident, 'a thread of C code')}:\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in sys._current_frames().items()
            if ident != threading.get_ident()
        )
        with contextlib.suppress(OSError):  # the disk may be what hangs, or it may be full
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"rank-{rank}.txt").write_text(text)
        return folder

    def leave(self) -> None:
        """Stop the watchdog.

        If ``awaits_others`` is set and there was no uncaught error, wait for the end of the other ranks first.
        """
        atexit.unregister(self.leave)
        if os.getpid() != self._pid or self._ended.is_set():
            return
        scratch.leave_on_sigterm()  # other ranks may be waited for
        # Not if the store is gone, because torch would print many warnings.
        if self._store is not None and self._answered_at != math.inf:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{self.rank} has ended", "")
                self._store.compare_set("ended first", "", str(self.rank))
                if hasattr(sys, "last_value"):  # an error, which has been printed
                    self._store.set("a rank has failed", "")
                elif self.awaits_others:
                    self._await_others()
        self._ended.set()
        self._alarmed.set()
        for thread in self._threads:
            thread.join(2 * self.period + 1.0)
        if self.strict:
            write_beat(None)
        self._dumps.close()

    def _await_others(self) -> None:
        """Wait for the other ranks to end. Raise the alarm for a silent rank, which cannot raise it itself."""
        self._leaving = True
        pulses = {rank: Pulse() for rank in range(self.size) if rank != self.rank}
        while not self._alarmed.is_set():
            self._since = time.monotonic()  # this wait does not count as lack of progress
            postpone_exit_limit()
            pulses = {rank: pulse for rank, pulse in pulses.items() if not self._has_ended(rank)}
            if not pulses:
                return
            if any(pulse.measure_silence(self._read_beat(rank)) > self.limit for rank, pulse in pulses.items()):
                self._alarm()
            time.sleep(min(0.1, self.period))
        time.sleep(_ANSWER + _REPORT + 2.0)  # the exchange ends this process


_current: list[Watchdog] = []


def watch(world: World, limit: float | None) -> Watchdog | None:
    """Start the watchdog of this process, or apply the new limit to a watchdog that already runs.

    If ``limit`` is None, the limit is slightly less than the time limit of a collective, and applies only to ranks that
    wait for others.

    Returns:
        The watchdog; None if there is nothing to watch, or if the store supports no watchdog and ``limit`` is None.

    Raises:
        ValueError: If ``limit`` is set and the store supports no watchdog.
    """
    strict = limit is not None
    if world.size > 1 and dist.get_backend() == "fake":
        return None
    if limit is None:
        limit = world.timeout.total_seconds()
        limit -= min(30.0, limit / 10)  # before the collective fails
    if world.size > 1 or strict:
        limit_exit(limit, f"rank {world.rank} of {world.size}")
    if _current and _current[0].size == world.size and _current[0]._pid == os.getpid():
        _current[0].set_limit(limit, strict)
        _current[0].thread = threading.current_thread()
        return _current[0]
    if world.size == 1 and not strict:
        return None
    dismiss()
    store = _connect(world) if world.size > 1 else None
    if world.size > 1 and store is None:
        if strict:
            raise ValueError(
                f"timeout=... with {world.size} processes needs torch 2.8 or newer, or a process group with a "
                f"TCPStore, but this is torch {torch.__version__}, and the script created the group with another "
                "store. Upgrade torch, create the group with a TCPStore, or remove timeout. Collectives have a "
                "separate limit, InitProcessGroupKwargs(timeout=...)."
            )
        return None
    _current.append(Watchdog(world, limit, strict, store))
    return _current[0]


def dismiss() -> None:
    """Stop the watchdog, because the process group and its store end."""
    for watchdog in _current:
        watchdog.leave()
    _current.clear()


def _connect(world: World) -> dist.Store | None:
    """Return a separate connection to the process group's store, or None if the store does not support this.

    Other threads would block a shared connection.
    """
    base: Any = dist.distributed_c10d._get_default_store()  # private, but present in torch from 1.x to 2.13
    server = base
    while isinstance(server, dist.PrefixStore):
        server = server.underlying_store
    if not isinstance(server, dist.TCPStore):
        return dist.PrefixStore("treadle watchdog", base.clone()) if hasattr(base, "clone") else None
    # Not with `Store.clone`, which exists only since torch 2.8. The name separates process groups, like the prefixes.
    name = base.compare_set("name of the watchdogs", "", uuid.uuid4().hex).decode()
    connection = dist.TCPStore(server.host, server.port, is_master=False, timeout=world.timeout, wait_for_workers=False)
    return dist.PrefixStore(f"treadle watchdog {name}", connection)


def _kill(pid: int) -> None:
    """Kill a process, and wait at most 0.5 s until it has ended."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 0.5
    while read_start_time(pid) is not None and time.monotonic() < end:
        time.sleep(0.002)


def _is_debugged(frames: Iterable[FrameType]) -> bool:
    return any(frame.f_globals.get("__name__") in _DEBUGGERS for frame in frames)


def _name_folder() -> str:
    return f"stacks-{datetime.now():%Y%m%d-%H%M%S}"
