"""Exit of a rank because of other ranks: after a hang, after another rank or the store has ended, or after its script.

After a hang all ranks exit: with status 1 if their calls do not match or a rank ended suddenly, such as through
`os._exit`, and otherwise with the status `HUNG`.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time

from ...common.messages import write_stderr
from ..processes import (
    Pulse,
    end_at_once,
    explain_silence,
    is_alive,
    is_stage_running,
    postpone_exit_limit,
    read_start_time,
    run_briefly,
    scratch,
)
from .hang_report import LONGEST, HangReport, RankMessages, Verdict
from .tracebacks import is_agent_store, silence_uncaught
from .training_clock import TrainingClock, is_waiting

HUNG = 124  # the exit status of timeout(1)
_LOST = 2.0  # seconds without progress, after another rank has ended, after which a rank counts as waiting
_INTERRUPT = 2.0  # seconds within which the main thread has to notice an interrupt


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
        if pid is not None and not _has_supervisor():
            _kill(pid)
        end_at_once(HUNG)

    def end_after_report(self, verdict: Verdict) -> None:
        """End this process after the ranks have reported a hang, and kill silent ranks of this machine."""
        # Treadle's supervisor would kill them itself, but torchrun would wait 30 s for them.
        for rank in [] if _has_supervisor() else verdict.silent:
            if (pid := self._messages.find_pid(rank)) is not None and is_alive(pid):
                _kill(pid)
        if verdict.failed or self._messages.rank not in verdict.blamed:
            run_briefly(scratch.remove_files)  # before the launcher notices the first end and ends this rank
            # Each rank needs the store for this, and rank zero may host it. The rank that hangs leaves first.
            time.sleep(0.3)
        end_at_once(1 if verdict.failed else HUNG)

    def is_stuck(self) -> bool:
        """Return whether this rank must end itself after another rank has ended, because NCCL would let it wait."""
        if _has_supervisor():  # it names the rank that has ended, and ends this one
            return False
        waits = is_stage_running() or is_waiting(self._clock.collect_frames())
        return waits and self._clock.measure_stillness() >= _LOST

    def end_if_another_ended(self) -> None:
        """Interrupt the main thread or end the process, if another rank has ended and this rank cannot continue."""
        if self.ended is None and (rank := self._messages.read("ended first")) is not None:
            self.ended = int(rank)
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
            self._clock.restart()
            postpone_exit_limit()
            pulses = {rank: pulse for rank, pulse in pulses.items() if not messages.has_ended(rank)}
            if not pulses:
                return
            limit = self._clock.limit
            if any(pulse.measure_silence(messages.read_beat(rank)) > limit for rank, pulse in pulses.items()):
                alarmed.set()
            time.sleep(min(0.1, self._clock.period))
        time.sleep(LONGEST)  # the exchange ends this process


def _has_supervisor() -> bool:
    return "TREADLE_SUPERVISOR" in os.environ


def _kill(pid: int) -> None:
    """Kill a process, and wait at most 0.5 s until it has ended."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 0.5
    while read_start_time(pid) is not None and time.monotonic() < end:
        time.sleep(0.002)
