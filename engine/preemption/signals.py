"""Handling of signals that request the end of a run."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, NoReturn

import torch

from ...common.durations import parse_duration
from ...common.messages import write_stderr
from ...strategies.distributed import PeerFailed, Watchdog
from ...strategies.processes import end_by_signal, mark_leaving, mark_stage
from ..optim import Accumulation
from .deadline import Deadline
from .departure import Departure

# SIGHUP means that the terminal was closed. If processes get different signals, the last one in this list counts.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
_REQUEUE_SIGNAL = getattr(signal, "SIGUSR1", None)
_DEADLY = tuple(getattr(signal, name) for name in ("SIGUSR2",) if hasattr(signal, name))
_FINALIZERS = {multiprocessing.util.Finalize.__call__.__code__, weakref.finalize.__call__.__code__}
_REQUEUE_LIMIT = 30  # seconds; the scheduler's own limit for an answer is 10 by default
# Seconds within which a rank may get the same Ctrl-C twice: from the user's `pkill` or its terminal, and from the
# launcher.
_ECHO = 1.0


class Preempted(SystemExit):
    """``SystemExit`` that ends the program after a signal, such as SIGTERM.

    If the signal arrives in the training loop of ``fit`` and a ModelCheckpoint saves full checkpoints, the Trainer
    saves a full checkpoint before it raises this exception. The exit status is 143 for SIGTERM, SIGUSR1 and SIGUSR2,
    and 129 for SIGHUP.

    Examples:
        >>> from treadle.engine import Preempted
        >>> try:
        ...     raise Preempted(143)
        ... except SystemExit as exit:
        ...     exit.code
        143
    """


class Preemption:
    """Handler for SIGTERM, SIGUSR1 and SIGHUP that lets a loop complete its step and save before the process ends.

    A signal does not interrupt a step or a save. If another rank has ended, however, the step raises `PeerFailed`,
    because it cannot finish. All ranks leave after the same step. In the context of `leaving_at_once`, a rank leaves
    immediately. After ``requeue_signal`` (SLURM's ``--signal=USR1@90``), which may also be SIGUSR2, `leave` asks SLURM
    to requeue the job.

    By default, Ctrl-C (SIGINT) immediately raises KeyboardInterrupt or calls the script's own handler. Inside
    `holding_interrupts`, KeyboardInterrupt is raised only after the save. Inside `catching_interrupts`, Ctrl-C is
    handled like the other signals. So is the first Ctrl-C after another signal, such as a scheduler's SIGTERM, because
    it must not cost the save. A second Ctrl-C is not delayed.

    Args:
        accumulation: The accumulation of the run, whose `Agreement` is the ranks' vote on when to leave.
        watchdog: The watchdog of the run; None if it has none.
        grace: Maximum time from the signal to the end of each process, in seconds. Default: no limit.
        requeue_signal: The signal after which the job is requeued; None for none. Default: SIGUSR1.

    Attributes:
        caught: The first signal that asked this process to end, or None.
        abandoned: Whether a second Ctrl-C arrived. In that case, nothing more is saved.

    Examples:
        >>> import treadle
        >>> accelerator = treadle.Accelerator(cpu=True)
        >>> with accelerator.preemptible() as preemption:
        ...     preemption.should_stop()
        False
    """

    def __init__(
        self,
        accumulation: Accumulation,
        watchdog: Watchdog | None,
        grace: float | None = None,
        requeue_signal: int | None = _REQUEUE_SIGNAL,
    ) -> None:
        self._accumulation, self._watchdog = accumulation, watchdog
        self._agreement, self._world = accumulation.agreement, accumulation.world
        self._grace = grace
        self._requeue_signal = requeue_signal
        # SIGUSR2 only on request, because programs also use it for other things, such as a dump of their stacks.
        self._signals = (*_SIGNALS, *(number for number in _DEADLY if number == requeue_signal))
        self._deadline: Deadline | None = None
        self.caught: signal.Signals | None = None
        self._agreed: signal.Signals | None = None
        self.interrupts = self.abandoned = False
        self.departure = Departure(self._world.rank, self._world.size)
        self._replaced: dict[signal.Signals, Callable[..., Any] | int] = {}
        self._pid = os.getpid()
        self._interrupted_at: float | None = None  # time of the first Ctrl-C that did not raise immediately
        self._raises_later = False  # whether that Ctrl-C raises KeyboardInterrupt later
        self._ignored: list[int] = []
        self._held = self._at_once = self._failing = False
        self._steps = 0  # number of times that a user-defined loop has asked
        self._speaks = self._world.is_main

    @contextmanager
    def watching(self) -> Iterator[Preemption]:
        """Return a context in which SIGTERM, SIGUSR1, SIGHUP and Ctrl-C (SIGINT) are handled.

        If the script has set a handler for a signal, this handler is called too. Outside the main thread, no signal is
        handled. A signal that arrives after the last step raises `Preempted` at the end of the context, unless the
        script has set a handler for the signal.
        """
        self.caught, self._agreed, self._pid, self._interrupted_at = None, None, os.getpid(), None
        self.interrupts = self.abandoned = self._held = self._at_once = self._failing = self._raises_later = False
        self._agreement.signal_vote = self._agreement.signaled = False
        self.departure.begin_stage(self._watchdog, self._start_deadline)
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        for number in self._signals:
            handler = signal.getsignal(number)
            if handler is not None and handler is not signal.SIG_IGN:  # None: set by code other than Python's
                self._replaced[number] = handler
                signal.signal(number, self._interrupt if number is signal.SIGINT else self._note)
        if self._grace is not None:
            self._deadline = Deadline(self._grace, tuple(self._replaced))
        try:
            yield self
        finally:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
            if self.caught is not None:
                mark_stage(running=False)
                self._set_interruptible(False)
            replaced, self._replaced = self._replaced, {}
            while self._ignored:
                signal.signal(self._ignored.pop(), signal.SIG_DFL)
            for number, handler in replaced.items():
                if signal.getsignal(number) in (self._note, self._interrupt):
                    signal.signal(number, handler)
        self._agreed = self._agreed or self.caught
        handler = None if self._agreed is None else replaced.get(self._agreed)
        if self._agreed is not None and (handler is end_by_signal or not callable(handler)):
            self.leave()

    @contextmanager
    def catching_interrupts(self) -> Iterator[None]:
        """Return a context in which Ctrl-C is handled like SIGTERM.

        If Ctrl-C was pressed, KeyboardInterrupt is raised at the end of the context, unless the script has set a
        handler for Ctrl-C.
        """
        self.interrupts = True
        try:
            yield
        finally:
            self.interrupts = False
        if self._raises_later:
            self._raise_delayed_interrupt()

    @contextmanager
    def leaving_at_once(self) -> Iterator[None]:
        """Return a context in which a signal, such as SIGTERM, raises `Preempted` immediately.

        Use it while there is nothing to save.
        """
        self._at_once = True
        try:
            self._leave_if_caught()
            yield
            self._leave_if_caught()  # of a signal that was received in a finalizer
        finally:
            self._at_once = False

    @contextmanager
    def holding_interrupts(self) -> Iterator[None]:
        """Return a context that delays the effects of signals until a save is complete.

        A second Ctrl-C and the end of the grace period are not delayed.
        """
        held, self._held = self._held, True
        try:
            yield
        finally:
            self._held = held
        self._leave_if_caught()
        self._raise_interruption()
        if self._raises_later and not (self.interrupts or held):
            self._raise_delayed_interrupt()

    def note_failure(self) -> None:
        """Record that an exception ends the run, so that `PeerFailed` does not replace that exception."""
        self._failing = True

    def _start_deadline(self) -> None:
        if (deadline := self._deadline) is not None:
            deadline.start()

    # -- handlers ------------------------------------------------------------------------------------------------

    def _note(self, number: int, frame: FrameType | None) -> None:
        caught = signal.Signals(number)
        if os.getpid() != self._pid:  # a child process that was forked within the block
            if caught is signal.SIGTERM:  # sent by the parent process, for example by `Process.terminate`
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return  # sent to the whole process group; data workers are needed for the step in progress
        if self._interruption() is None:
            self._set(caught)
            handler = self._replaced.get(caught)
            # Not a handler of Treadle's, left by an earlier stage that failed.
            if callable(handler) and handler is not end_by_signal:
                handler(number, frame)
        if not _is_in_finalizer(frame):  # otherwise the block's end, or the watchdog's next signal, follows soon
            self._leave_if_caught()
            self._raise_interruption()

    def _set(self, caught: signal.Signals) -> None:
        if self.caught is None:
            self.caught = caught
            if not self._at_once:  # otherwise the others would wait for this rank's answers
                self._agreement.signal()
                self.departure.ask()
                self._set_interruptible(True)
            mark_leaving()
            for number in _DEADLY:  # not a second request, although the system's default would end the process
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, signal.SIG_IGN)
                    self._ignored.append(number)

    def _set_interruptible(self, interruptible: bool) -> None:
        if self._watchdog is not None:
            self._watchdog.exit.interruptible = interruptible
            self._watchdog.exit.interrupted = False

    def _interruption(self) -> int | None:
        """Return a rank that has ended while this rank waits to leave after a signal; else None."""
        watchdog = self._watchdog
        return watchdog.exit.ended if watchdog is not None and watchdog.exit.interruptible else None

    def _raise_interruption(self) -> None:
        """Raise `PeerFailed` if `_interruption` returns a rank, because this rank's step cannot finish without it."""
        rank, watchdog = self._interruption(), self._watchdog
        if rank is None or watchdog is None:
            return
        watchdog.exit.interrupted = True
        if not (self._held or self._failing):
            self._failing = True
            raise PeerFailed(f"rank {rank} of {self._world.size} has ended, so this rank can't finish its step.")

    def _leave_if_caught(self) -> None:
        if not self._at_once or self._held or self.caught is None:
            return
        self._at_once = False  # another signal must not interrupt the cleanup
        if self._watchdog is not None:
            self._watchdog.exit.awaits_others = False
        # Other ranks may not get the signal.
        self._speaks = self._world.claim("leaves before the first step")
        if self._speaks:
            write_stderr(f"{self.caught.name} ends the run before its first step, so there is nothing to save")
        self._agreed = self.caught
        self.leave()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            if not multiprocessing.current_process().daemon:  # data workers are daemonic: the rank ends them
                self._raise_interrupt(frame)
            return
        if not (self.interrupts or self._held or self.caught is not None):
            self._raise_interrupt(frame)
        elif self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
            self._raises_later = self.caught is None
            if self._world.is_main:
                ending = "is saved and ends after this step" if self.interrupts else "ends after this save"
                if self.caught is not None:
                    ending = f"already ends because of {self.caught.name}"
                write_stderr(f"Ctrl-C: the run {ending}; press Ctrl-C again to end it immediately")
            if self.interrupts:
                self._set(signal.SIGINT)
            handler = self._replaced[signal.SIGINT]
            if callable(handler) and handler is not signal.default_int_handler:
                handler(number, frame)
        elif self._world.size == 1 or time.monotonic() - self._interrupted_at > _ECHO:
            self.abandoned = True
            self._raise_interrupt(frame)

    def _raise_interrupt(self, frame: FrameType | None) -> None:
        """Handle Ctrl-C as if Treadle had not replaced the handler."""
        handler = self._replaced.get(signal.SIGINT, signal.default_int_handler)
        if callable(handler):
            handler(signal.SIGINT, frame)
        else:  # the system's default: the process ends
            signal.signal(signal.SIGINT, handler)
            signal.raise_signal(signal.SIGINT)

    def _raise_delayed_interrupt(self) -> None:
        """Handle a delayed Ctrl-C, unless the script has its own handler, which was called when Ctrl-C arrived."""
        handler = self._replaced.get(signal.SIGINT, signal.default_int_handler)
        if not callable(handler) or handler is signal.default_int_handler:
            self._raise_interrupt(None)

    # -- in user-defined loops -----------------------------------------------------------------------------------

    def should_stop(self) -> bool:
        """Return whether the loop must save and leave now. The result is the same on every rank.

        Every rank must call this method the same number of times, ideally once per batch. While
        ``accelerator.sync_gradients`` is False, the result is False, because accumulated gradients are not saved.
        """
        if not self._accumulation.sync_gradients:
            return False
        self._steps += 1
        leaves = self.departure.must_leave(self._steps)
        if leaves:  # all ranks complete the current work, and some may end first
            self._set_interruptible(False)
        return leaves

    # -- the end -------------------------------------------------------------------------------------------------

    def agree_on_signal(self) -> signal.Signals | None:
        """Return the signal that ends the run; None if no rank received one. Must be called on all ranks."""
        self._set_interruptible(False)
        rating = torch.tensor(-1 if self.caught is None else self._signals.index(self.caught), device="cpu")
        index = int(self._world.all_reduce(rating, "max"))
        self._agreed = self._signals[index] if index >= 0 else None
        return self._agreed

    def leave(self) -> NoReturn:
        """End the process; if asked by ``requeue_signal``, first let SLURM requeue the job. Call it on all ranks.

        Raises:
            Preempted: After any signal except Ctrl-C.
            KeyboardInterrupt: After Ctrl-C.
        """
        caught = self._agreed or self.agree_on_signal()
        assert caught is not None, "no rank got a signal"
        if caught is signal.SIGINT:
            raise KeyboardInterrupt
        if caught == self._requeue_signal and self._speaks:
            requeue_job()
        raise Preempted(128 + (signal.SIGTERM if "SIGUSR" in caught.name else caught))


def _is_in_finalizer(frame: FrameType | None) -> bool:
    """Return whether a signal has interrupted a finalizer, whose exceptions Python prints and ignores."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code in _FINALIZERS:
            return True
        frame = frame.f_back
    return False


@contextmanager
def preemptible(
    accumulation: Accumulation, watchdog: Watchdog | None, grace: Any, interrupts: bool
) -> Iterator[Preemption]:
    """Return a context that handles signals in a user-defined loop; see `Accelerator.preemptible`."""
    seconds = None if grace is None else parse_duration("grace", grace).total_seconds()
    preemption = Preemption(accumulation, watchdog, seconds)
    with preemption.watching(), preemption.catching_interrupts() if interrupts else nullcontext():
        preemption.departure.begin_loop()
        try:
            yield preemption
        finally:
            preemption.departure.end_loop()


def requeue_job() -> None:
    """Ask SLURM to requeue this job, if there is one, and print the result to stderr."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    command = ["scontrol", "requeue", job]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_REQUEUE_LIMIT, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (isinstance(error, subprocess.CalledProcessError) and error.stderr.strip()) or error
        write_stderr(
            f"job {job} was not requeued: {reason}. Use sbatch --requeue, or submit it again; ckpt_path='auto' resumes "
            "where it stopped."
        )
    else:
        write_stderr(f"job {job} was requeued")
