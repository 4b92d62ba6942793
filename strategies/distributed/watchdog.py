"""Watchdog that ends a run if a rank hangs for longer than a limit, and reports the rank, its phase and its step.

In each process, two daemon threads work independently of the training. With a world size of one, there is only the
first.

- The clock thread reads the stack of the training thread once per period (`TrainingClock`). If the thread has made no
  progress for the time of the limit, the clock thread raises the alarm.
- The exchange reports to the store once per period that this process is alive, and where it is. When a rank has raised
  the alarm, the exchange answers it (`HangReport`) and records in the store whether this rank waits for others. A rank
  that has done nothing but wait in a collective for some seconds counts as stalled (`StalledCalls`). If all ranks are
  stalled in calls that do not match, none of the calls can end. The run then ends immediately, with an error that lists
  the calls.

If no rank has made progress since the alarm, one rank prints the report. Then all ranks exit (`RankExit`), with status
1 if their calls do not match or a rank ended suddenly, such as through `os._exit`, and otherwise with status `HUNG`.

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
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist

from ...common.messages import write_stderr
from ..processes import (
    Idleness,
    Pulse,
    end_at_once,
    explain_silence,
    is_alive,
    is_stage_running,
    limit_exit,
    os_process,
    postpone_exit_limit,
    read_start_time,
    run_briefly,
    write_beat,
)
from . import process_group
from .hang_report import LONGEST, HangReport, RankMessages, Verdict
from .tracebacks import is_agent_store, silence_uncaught
from .training_clock import TrainingClock, ask_weakly, describe_phase, progress
from .waiting_call import WaitingCall, describe_calls_that_differ, describe_mismatch, find_waiting_call, is_waiting
from .world import World

HUNG = 124  # the exit status of timeout(1)
_LOST = 2.0  # seconds without progress, after another rank has ended, after which a rank counts as waiting
_INTERRUPT = 2.0  # seconds within which the main thread has to notice an interrupt
_FIRST = 10  # beats during which rank 0 is searched for on this machine
_HURRY = 0.02  # seconds between calls of a periodic function that waits for other ranks, as before a common exit
_MOST_LOOKED_AT = 64  # ranks that each rank that waits for a meeting examines
_PASSED = 2.0  # seconds after which a rank that waits elsewhere has passed by a meeting
_STALL = 8.0  # seconds of waiting after which a rank counts as stalled

_AT_END = WaitingCall("the end of the script", "has reached the end of the script")


class StalledCalls:
    """Calls in which the ranks are stalled, compared through the store.

    Attributes:
        own: The call in which this rank is stalled, or None. The clock thread sets it.
    """

    def __init__(self, clock: TrainingClock, messages: RankMessages) -> None:
        self._clock, self._messages = clock, messages
        self._idleness = Idleness()
        self.own: WaitingCall | None = None
        self._published: WaitingCall | None = None  # what the other ranks know of it
        self._count = 0  # number of stalled ranks

    def find_own(self, frames: list[FrameType], stillness: float) -> WaitingCall | None:
        """Return the call in which this rank is stalled after some seconds without progress, or None."""
        # Below the limit, so that a mismatch is reported as such, and not as a rank that hangs.
        if not stillness or min(self._idleness.measure(), stillness) < min(_STALL, 0.7 * self._clock.limit):
            return None
        call = find_waiting_call(frames)
        details = ", ".join(filter(None, [describe_phase(frames), self._clock.locate()[0]]))
        return call and WaitingCall(call.kind, f"{call.words} ({details})")

    def publish(self) -> bool:
        """Update the count of stalled ranks. Return whether all ranks are stalled, in calls not compared before."""
        store, own, published, count = self._messages.store, self.own, self._published, self._count
        if own is None and published is None:
            return False
        self._published = own
        if own is not None and own != published:
            store.set(f"call of {self._messages.rank}", json.dumps([own.kind, own.words]))
        self._count = store.add("stalled", (own is not None) - (published is not None))
        size = self._messages.size
        return self._count == size and (count, published) != (size, own)

    def find_mismatch(self) -> str:
        """Publish this rank's call, and describe the calls that do not match; return "" if no mismatch is certain."""
        if not self.publish():
            return self._find_skipped_meeting()
        store, size = self._messages.store, self._messages.size
        if store.add("stalled", 0) < size:  # a rank is no longer stalled
            return ""
        return describe_mismatch({rank: WaitingCall(*json.loads(store.get(f"call of {rank}"))) for rank in range(size)})

    def _find_skipped_meeting(self) -> str:
        """Describe the calls if this rank is stalled in `World.meet`, which another rank has passed by; else return "".

        The other rank may be in a collective of NCCL, in which it waits without a stack or idleness that shows it.
        """
        if self._published is None or not self._published.kind.startswith("meet "):
            return ""
        calls = {self._messages.rank: self._published.words}
        # A rank that is seen to wait is stalled by then, and names its own call.
        seconds = _STALL + 2 * self._clock.period
        for rank in range(min(self._messages.size, _MOST_LOOKED_AT)):
            beat = self._messages.read_beat(rank)
            if beat is not None and beat["progress"] > progress.measure() and beat["still"] >= seconds:
                calls[rank] = f"has continued, and waits or works {beat['where']}"
        return describe_calls_that_differ(calls) if len(calls) > 1 else ""


class RankExit:
    """Exit of this rank because of other ranks.

    Attributes:
        awaits_others: Whether this process waits at its end until all other processes have ended.
        ended: The first rank that is known to have ended, or None.
        interruptible: Whether SIGTERM may be sent to the main thread after another rank has ended.
        interrupted: Whether the main thread has handled this SIGTERM.
        store_pid: Process ID of rank 0 if it hosts the store on this machine, or None.
    """

    def __init__(self, clock: TrainingClock, messages: RankMessages, report: HangReport) -> None:
        self._clock, self._messages, self._report = clock, messages, report
        self.awaits_others = clock.strict
        self.ended: int | None = None
        self.interruptible = self.interrupted = False
        self.store_pid: int | None = None
        self._interrupted_at = math.inf

    def end_alone(self) -> None:
        """End this process, which makes no progress and is the only one of its run."""
        folder = self._report.write_own_stacks()
        write_stderr(f"no progress for {self._clock.limit:g} s: {self._clock.describe()}; stacks: {folder}")
        end_at_once(HUNG)

    def end_without_store(self) -> None:
        """End this process, because the store does not respond, so no other rank can be reached."""
        silence_uncaught()
        folder = self._report.write_own_stacks()
        rank, size, pid = self._messages.rank, self._messages.size, self.store_pid
        host = "the launcher" if is_agent_store() else f"rank 0 of {size}"
        condition = f"has not responded for {self._clock.limit:g} s and may be stopped"
        if pid is not None and is_alive(pid):  # retrieving its stacks would let it continue
            condition = f"(process {pid}) {explain_silence(pid)}"
        write_stderr(f"{host} {condition}. It hosts the run's store, so rank {rank} exits; stacks: {folder}")
        if pid is not None and "TREADLE_SUPERVISOR" not in os.environ:
            _kill(pid)
        end_at_once(HUNG)

    def end_after_report(self, verdict: Verdict) -> None:
        """End this process after the ranks have reported a hang, and kill silent ranks of this machine."""
        # Treadle's supervisor would kill them itself, but torchrun would wait 30 s for them.
        for rank in [] if "TREADLE_SUPERVISOR" in os.environ else verdict.silent:
            if (pid := self._messages.find_pid(rank)) is not None and is_alive(pid):
                _kill(pid)
        if verdict.failed or self._messages.rank not in verdict.blamed:
            run_briefly(os_process.remove_files)  # before the launcher notices the first end and ends this rank
            # Each rank needs the store for this, and rank zero may host it. The rank that hangs leaves first.
            time.sleep(0.3)
        end_at_once(1 if verdict.failed else HUNG)

    def is_stuck(self) -> bool:
        """Return whether this rank must end itself after another rank has ended, because NCCL would let it wait."""
        if "TREADLE_SUPERVISOR" in os.environ:  # it names the rank that has ended, and ends this one
            return False
        waits = is_stage_running() or is_waiting(self._clock.collect_frames())
        return waits and self._clock.measure_stillness() >= _LOST

    def end_if_another_ended(self) -> None:
        """Interrupt the main thread or end the process, if another rank has ended and this rank cannot continue."""
        if self.ended is None and (first := self._messages.read("ended first")) is not None:
            self.ended = int(first)
        if self.ended is None:
            return
        if not self.interruptible or self.interrupted:
            self._interrupted_at = math.inf
        else:
            self._interrupted_at = min(self._interrupted_at, time.monotonic())
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        overdue = time.monotonic() - self._interrupted_at > _INTERRUPT
        if overdue or (self.is_stuck() and self._messages.store.check(["a rank has failed"])):
            rank, size = self._messages.rank, self._messages.size
            write_stderr(f"rank {rank} of {size} exits in the middle of a step, because rank {self.ended} has ended")
            end_at_once(1)

    def await_others(self, alarmed: threading.Event) -> None:
        """Wait for the other ranks to end. Raise the alarm for a silent rank, which cannot raise it itself."""
        messages = self._messages
        pulses = {rank: Pulse() for rank in range(messages.size) if rank != messages.rank}
        while not alarmed.is_set():
            self._clock.since = time.monotonic()  # this wait does not count as lack of progress
            postpone_exit_limit()
            pulses = {rank: pulse for rank, pulse in pulses.items() if not messages.has_ended(rank)}
            if not pulses:
                return
            limit = self._clock.limit
            if any(pulse.measure_silence(messages.read_beat(rank)) > limit for rank, pulse in pulses.items()):
                alarmed.set()
            time.sleep(min(0.1, self._clock.period))
        time.sleep(LONGEST)  # the exchange ends this process


class Watchdog:
    """Watchdog of one process, which also observes other processes through the store.

    Attributes:
        size: World size.
        clock: Clock of the training thread, with the limit.
        exit: Exit of this process because of other ranks.
    """

    def __init__(self, world: World, limit: float, strict: bool, store: dist.Store | None = None) -> None:
        self.size = world.size
        self.clock = TrainingClock(limit, strict, world.size)
        self._messages = RankMessages(store, world.rank, world.size)
        self._report = HangReport(self.clock, self._messages)
        self._stalled_calls = StalledCalls(self.clock, self._messages)
        self.exit = RankExit(self.clock, self._messages, self._report)
        self._periodic: Callable[[dist.Store], bool] = lambda store: False
        self._periodic_count = 0
        self.pid = os.getpid()
        self._leaving = False
        self._stopped = threading.Event()
        self._alarmed = threading.Event()
        self._threads = [threading.Thread(target=self._run_clock, name="treadle watchdog", daemon=True)]
        if store is not None:
            self._threads.append(threading.Thread(target=self._exchange, name="treadle exchange", daemon=True))
        for thread in self._threads:
            thread.start()
        atexit.register(self.stop)

    def set_limit(self, limit: float, strict: bool) -> None:
        """Set the limit in seconds, and whether it also applies to ranks that do not wait for others."""
        self.clock.set_limit(limit, strict, self.size)
        self.exit.awaits_others = strict

    def follow(
        self, owner: Any, locate: Callable[[Any], tuple[str, Any]], find_directory: Callable[[Any], Any]
    ) -> None:
        """Include the run of ``owner`` in reports as long as ``owner`` exists.

        ``locate`` returns the position of the run as text, and a value that changes whenever the run makes progress.
        ``find_directory`` returns the directory of the run; None means the working directory.
        """
        self.clock.locate = ask_weakly(owner, locate, ("", None))
        self._report.find_directory = ask_weakly(owner, find_directory, None)

    def call_each_period(self, function: Callable[[dist.Store], bool]) -> int:
        """Call a function with the store once per period, in a thread, and again soon if the function returns True.

        The function replaces the previous one. All ranks must set their functions in the same order.

        Returns:
            The number of the function, which is the same on all ranks.
        """
        self._periodic = function
        self._periodic_count += 1
        return self._periodic_count

    def _run_clock(self) -> None:
        clock, store, read_at = self.clock, self._messages.store, 0.0
        while not self._stopped.wait(clock.period if read_at else 0):
            now = time.monotonic()
            if clock.strict:  # the supervisor can notice that all ranks are stopped
                write_beat(self._report.make_beat())
            if now - (read_at or now) > 2 * clock.period + 1.0:  # this process or its machine was stopped
                clock.since = self._messages.answered_at = now
            read_at = now
            frames = clock.collect_frames()
            stillness = clock.read(frames, now)
            if stillness >= clock.limit and (clock.strict or is_waiting(frames)):
                if store is None:
                    self.exit.end_alone()
                self._alarmed.set()
            self._stalled_calls.own = _AT_END if self._leaving else self._stalled_calls.find_own(frames, stillness)
            if store is not None and now - self._messages.answered_at > clock.limit:
                self.exit.end_without_store()
            del frames

    def _exchange(self) -> None:
        messages, clock = self._messages, self.clock
        with contextlib.suppress(RuntimeError):  # the store's process has ended: the collectives will report it
            number, woke, pulse = 0, time.monotonic(), Pulse()
            while not self._stopped.is_set():
                # All ranks may have been stopped, and the neighbour may still be.
                if time.monotonic() - woke > 2 * clock.period + 1.0:
                    pulse = Pulse()
                number, woke = number + 1, time.monotonic()
                messages.store.set(f"beat of {messages.rank}", json.dumps(self._report.make_beat()))
                self._observe_others(pulse)
                if self.exit.store_pid is None and number <= _FIRST and messages.rank != 0 and not is_agent_store():
                    self.exit.store_pid = messages.find_pid(0)
                if mismatch := self._stalled_calls.find_mismatch():
                    self._report.note_mismatch(mismatch)
                    self._alarmed.set()
                requested = self._report.is_requested()
                messages.answered_at = time.monotonic()
                if self._stopped.is_set():  # `stop` sets `_alarmed` only to wake this thread
                    break
                if requested or self._alarmed.is_set():
                    self._answer()
                unfinished = self._periodic(messages.store)
                self._alarmed.wait(_HURRY if unfinished else clock.period)  # `stop` also sets it
            if not hasattr(sys, "last_value"):  # a rank that waits for this one from now on waits in vain
                self._leaving, self._stalled_calls.own = True, _AT_END
                self._stalled_calls.publish()
        messages.answered_at = math.inf

    def _observe_others(self, pulse: Pulse) -> None:
        """Raise the alarm if the next rank is silent, or is lost and this one cannot continue; end with other ranks."""
        messages = self._messages
        neighbour = (messages.rank + 1) % self.size
        silence = pulse.measure_silence(messages.read_beat(neighbour))
        if silence > self.clock.limit and not messages.has_ended(neighbour):
            self._alarmed.set()
        if messages.is_lost(neighbour):
            messages.note_first_end(neighbour)
            if self.exit.is_stuck():
                self._alarmed.set()
        self.exit.end_if_another_ended()

    def _answer(self) -> None:
        verdict = self._report.answer(self._alarmed.is_set())
        if verdict is not None:
            self.exit.end_after_report(verdict)
        self._alarmed.clear()
        self.clock.since = time.monotonic()

    def stop(self) -> None:
        """Stop the watchdog.

        If the exit awaits the other ranks and there was no uncaught error, wait for their end first.
        """
        atexit.unregister(self.stop)
        if os.getpid() != self.pid or self._stopped.is_set():
            return
        os_process.leave_on_sigterm()  # other ranks may be waited for
        # Not if the store is gone, because torch would print many warnings.
        if self._messages.store is not None and self._messages.answered_at != math.inf:
            with contextlib.suppress(RuntimeError):
                self._messages.store.set(f"{self._messages.rank} has ended", "")
                self._messages.note_first_end(self._messages.rank)
                if hasattr(sys, "last_value"):  # an error, which has been printed
                    self._messages.store.set("a rank has failed", "")
                elif self.exit.awaits_others:
                    self._leaving = True
                    self.exit.await_others(self._alarmed)
        self._stopped.set()
        self._alarmed.set()
        for thread in self._threads:
            thread.join(2 * self.clock.period + 1.0)
        if self.clock.strict:
            write_beat(None)
        self._report.dumps.close()


_current: list[Watchdog] = []


def watch(world: World, limit: float | None) -> Watchdog | None:
    """Start the watchdog of this process, or apply the new limit to a watchdog that already runs.

    If ``limit`` is None, the limit is slightly less than the time limit of a collective, and applies only to ranks that
    wait for others.

    Returns:
        The watchdog; None if there is nothing to watch.
    """
    strict = limit is not None
    if world.size > 1 and dist.get_backend() == "fake":
        return None
    if limit is None:
        limit = world.timeout.total_seconds()
        limit -= min(30.0, limit / 10)  # before the collective fails
    if world.size > 1 or strict:
        limit_exit(limit, f"rank {world.rank} of {world.size}")
    if _current and _current[0].size == world.size and _current[0].pid == os.getpid():
        _current[0].set_limit(limit, strict)
        _current[0].clock.thread = threading.current_thread()
        return _current[0]
    if world.size == 1 and not strict:
        return None
    dismiss()
    store = _connect() if world.size > 1 else None
    process_group.on_disconnect(dismiss)
    _current.append(Watchdog(world, limit, strict, store))
    return _current[0]


class PassedMeeting:
    """Check whether all other ranks have passed by a meeting in which this rank waits, for `World.meet`.

    Args:
        world: All ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._messages: RankMessages | None = None
        self._next = time.monotonic() + _PASSED

    def __call__(self) -> bool:
        """Return whether all others have taken steps beyond it, and have waited since. They are asked once a second."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + 1.0
        if self._messages is None:
            self._messages = RankMessages(_connect(), self._world.rank, self._world.size)
        beats = map(self._messages.read_beat, {*range(self._world.size)} - {self._world.rank})
        return all(b is not None and b["progress"] > progress.measure() and b["still"] >= _PASSED for b in beats)


def dismiss() -> None:
    """Stop the watchdog, because the process group and its store end."""
    for watchdog in _current:
        watchdog.stop()
    _current.clear()


def _connect() -> dist.Store:
    """Return a separate connection to the process group's store, because other threads would block a shared one."""
    base: Any = dist.distributed_c10d._get_default_store()  # private, but present in torch from 1.x to 2.14
    return dist.PrefixStore("treadle watchdog", base.clone())


def _kill(pid: int) -> None:
    """Kill a process, and wait at most 0.5 s until it has ended."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 0.5
    while read_start_time(pid) is not None and time.monotonic() < end:
        time.sleep(0.002)
