"""Signals that ask a run to end: the machine is preempted, the job's time is up, or somebody pressed Ctrl-C."""

from __future__ import annotations

import contextlib
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
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ...common.durations import parse_duration
from ...strategies.distributed import PeerFailed
from ...strategies.processes import end_by_signal, mark_leaving, mark_stage
from .deadline import Deadline
from .departure import Departure

if TYPE_CHECKING:
    from ..accelerator import Accelerator

# SIGHUP: the terminal has closed. Where processes get different signals, the one that stands last here counts.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
_FINALIZERS = {multiprocessing.util.Finalize.__call__.__code__, weakref.finalize.__call__.__code__}
_REQUEUE_LIMIT = 30  # seconds; the scheduler's own limit for an answer is 10 by default
# Seconds in which a rank may get one Ctrl-C twice: from the user's `pkill` or its terminal, and from the launcher.
_ECHO = 1.0


class Preempted(SystemExit):
    """A signal ended the run, after it was saved.

    The exit status is what a shell says of a program that the signal ended: 143 for SIGTERM, 129 for SIGHUP. It is 143
    for SIGUSR1 too, which schedulers send some time before SIGTERM.
    """


class Preemption:
    """Notes the first SIGTERM, SIGUSR1 or SIGHUP while training runs; the loop saves and leaves after the step.

    The handler only sets a flag, so a signal never breaks a step or a save, whether it comes once or again. All ranks
    leave after the same step, whoever got the signal. In the Trainer's loop the flag travels with the votes of each
    step; in a loop of your own, and in evaluations, the ranks agree through the store, which takes up to two seconds.

    SIGUSR1 is what SLURM's ``--signal=USR1@90`` sends before a job's time is up: then the job is requeued too.

    Before the first step nothing has to be saved: in the block of `leaving_at_once` a rank that gets a signal leaves
    without waiting for the others, whatever it is doing, and its launcher tells them.

    Ctrl-C (SIGINT) raises KeyboardInterrupt at once, but for two cases: where ``interrupts`` is set it is noted like
    the other signals, and `holding_interrupts` lets a save complete first. A second Ctrl-C is not held back.

    Args:
        accelerator: whose votes carry the flag.
        grace: seconds from the first signal, to any rank, to the end of all ranks, whatever they do then.

    Attributes:
        caught: the signal this process got; None if none came.
        interrupts: note Ctrl-C as the other signals are noted.
        abandoned: a second Ctrl-C came, so nothing more is to be saved.
        departure: lets loops without votes, of an evaluation, end together.
    """

    def __init__(self, accelerator: Accelerator, grace: float | None = None) -> None:
        self._grace = grace
        self._deadline: Deadline | None = None
        self.caught: signal.Signals | None = None
        self._agreed: signal.Signals | None = None
        self.interrupts = self.abandoned = False
        self._accelerator = accelerator
        self._agreement = accelerator.agreement
        self.departure = Departure(accelerator.process_index, accelerator.num_processes)
        self._replaced: dict[signal.Signals, Callable[..., Any] | int] = {}
        self._pid = os.getpid()
        self._interrupted_at: float | None = None  # the first Ctrl-C that was not raised at once
        self._held = self._at_once = self._failing = False
        self._steps = 0  # asked for by a loop of the user's own
        self._speaks = accelerator.is_main_process

    @contextmanager
    def watching(self) -> Iterator[Preemption]:
        """Catch the signals in a block.

        A handler of the script's own is called too. Signals that are ignored stay so, and outside the main thread,
        where Python can't set handlers, nothing is caught. A signal that came after the last step raises `Preempted`
        at the end of the block, when all cleanup is done; not where the script has a handler of its own.
        """
        self.caught, self._agreed, self._pid, self._interrupted_at = None, None, os.getpid(), None
        self.interrupts = self.abandoned = self._held = self._at_once = self._failing = False
        self._agreement.signal_vote = self._agreement.signaled = False
        self.departure.begin_stage(self._accelerator.watchdog, self._hear)
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler is not None and handler is not signal.SIG_IGN:  # None: set by something that is not Python
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
            for number, handler in replaced.items():
                if signal.getsignal(number) in (self._note, self._interrupt):
                    signal.signal(number, handler)
        self._agreed = self._agreed or self.caught
        handler = None if self._agreed is None else replaced.get(self._agreed)
        if self._agreed is not None and (handler is end_by_signal or not callable(handler)):
            self.leave()

    @contextmanager
    def catching_interrupts(self) -> Iterator[None]:
        """Note Ctrl-C in a block rather than raise KeyboardInterrupt at once; its end does, if nobody has left."""
        self.interrupts = True
        try:
            yield
        finally:
            self.interrupts = False
        if self._interrupted_at is not None:
            self._raise_interrupt(None)

    @contextmanager
    def leaving_at_once(self) -> Iterator[None]:
        """Raise `Preempted` in a block as soon as a signal comes: nothing is lost, and the block may take long."""
        self._at_once = True
        try:
            self._leave_if_caught()
            yield
            self._leave_if_caught()  # of a signal that came in a finalizer
        finally:
            self._at_once = False

    @contextmanager
    def holding_interrupts(self) -> Iterator[None]:
        """Let the block, a save, end before a signal raises an exception."""
        held, self._held = self._held, True
        try:
            yield
        finally:
            self._held = held
        self._leave_if_caught()
        self._raise_interruption()
        if self._interrupted_at is not None and not (self.interrupts or held):
            self._raise_interrupt(None)

    def note_failure(self) -> None:
        """Say that an exception ends the run, which a signal is not to replace by another one."""
        self._failing = True

    def _hear(self) -> None:
        """Another rank has got a signal; called by a thread."""
        if (deadline := self._deadline) is not None:
            deadline.hear()

    # -- handlers ------------------------------------------------------------------------------------------------

    def _note(self, number: int, frame: FrameType | None) -> None:
        caught = signal.Signals(number)
        if os.getpid() != self._pid:  # a child that was forked within the block
            if caught is signal.SIGTERM:  # from whoever started it, such as `Process.terminate`
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return  # to the whole process group; data workers are needed for the step in progress
        if self._interruption() is None:
            self._set(caught)
            handler = self._replaced.get(caught)
            if callable(handler) and handler is not end_by_signal:  # that is ours, of a stage that has failed before
                handler(number, frame)
        if not _is_in_finalizer(frame):  # else the block's end, or the watchdog's next signal, comes soon
            self._leave_if_caught()
            self._raise_interruption()

    def _set(self, caught: signal.Signals) -> None:
        if self.caught is None:
            self.caught = caught
            if not self._at_once:  # else the others would wait for this rank's answers
                self._agreement.signal()
                self.departure.ask()
                self._set_interruptible(True)
            mark_leaving()

    def _set_interruptible(self, interruptible: bool) -> None:
        watchdog = self._accelerator.watchdog
        if watchdog is not None:
            watchdog.interruptible = interruptible
            watchdog.interrupted = False

    def _interruption(self) -> int | None:
        """Return a rank that has ended, so that this one, which has noted a signal, leaves without an agreement."""
        watchdog = self._accelerator.watchdog
        return watchdog.ended if watchdog is not None and watchdog.interruptible else None

    def _raise_interruption(self) -> None:
        """Leave the step, in which nothing can be saved any more; outside of a save, which the block completes."""
        rank, watchdog = self._interruption(), self._accelerator.watchdog
        if rank is None or watchdog is None:
            return
        watchdog.interrupted = True
        if not (self._held or self._failing):
            self._failing = True
            raise PeerFailed(
                f"rank {rank} of {self._accelerator.num_processes} has ended, so this one can't finish its step."
            )

    def _leave_if_caught(self) -> None:
        """Leave, in the block of `leaving_at_once` and outside of a save."""
        if not self._at_once or self._held or self.caught is None:
            return
        self._at_once = False  # another signal must not interrupt the cleanup
        if self._accelerator.watchdog is not None:
            self._accelerator.watchdog.awaits_others = False
        self._speaks = self._accelerator.world.claim("leaves before the first step")  # others may not get the signal
        if self._speaks:
            _say(f"{self.caught.name} ends the run before it has begun, so there is nothing to save")
        self._agreed = self.caught
        self.leave()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            if not multiprocessing.current_process().daemon:  # data workers are: the rank ends them
                self._raise_interrupt(frame)
            return
        if not (self.interrupts or self._held):
            self._raise_interrupt(frame)
        elif self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
            if self._accelerator.is_main_process:
                what = "step, where the run is saved" if self.interrupts else "save"
                _say(f"Ctrl-C: the run ends after this {what}; press Ctrl-C again to end it at once")
            if self.interrupts:
                self._set(signal.SIGINT)
            handler = self._replaced[signal.SIGINT]
            if callable(handler) and handler is not signal.default_int_handler:
                handler(number, frame)
        elif self._accelerator.num_processes == 1 or time.monotonic() - self._interrupted_at > _ECHO:
            self.abandoned = True
            self._raise_interrupt(frame)

    def _raise_interrupt(self, frame: FrameType | None) -> None:
        """Do what Ctrl-C does without Treadle."""
        handler = self._replaced.get(signal.SIGINT, signal.default_int_handler)
        if callable(handler):
            handler(signal.SIGINT, frame)
        else:  # the system's own: the process ends
            signal.signal(signal.SIGINT, handler)
            signal.raise_signal(signal.SIGINT)

    # -- in a loop of your own -----------------------------------------------------------------------------------

    def should_stop(self) -> bool:
        """Return whether to save and leave now; the same on every rank.

        Every rank must ask equally often, best once per batch. Within a group of accumulated micro-batches the answer
        is always False, as nothing could be saved there. It costs no exchange.
        """
        if not self._accelerator.sync_gradients:
            return False
        self._steps += 1
        leaves = self.departure.must_leave(self._steps)
        if leaves:  # what is done now, all do, and some may end first
            self._set_interruptible(False)
        return leaves

    # -- the end -------------------------------------------------------------------------------------------------

    def agree(self) -> signal.Signals | None:
        """Return the signal that ends the run, None if no rank got one. All ranks must call it."""
        self._set_interruptible(False)
        rating = torch.tensor(-1 if self.caught is None else _SIGNALS.index(self.caught), device="cpu")
        index = int(self._accelerator.world.all_reduce(rating, "max"))
        self._agreed = _SIGNALS[index] if index >= 0 else None
        return self._agreed

    def leave(self) -> NoReturn:
        """Requeue the job if its time is up, and end. Save before; all ranks must call it.

        Raises:
            Preempted: for every signal but Ctrl-C.
            KeyboardInterrupt: for Ctrl-C.
        """
        caught = self._agreed or self.agree()
        assert caught is not None, "no rank got a signal"
        if caught is signal.SIGINT:
            raise KeyboardInterrupt
        if caught.name == "SIGUSR1":
            if self._speaks:
                requeue_job()
            caught = signal.SIGTERM
        raise Preempted(128 + caught)


def _is_in_finalizer(frame: FrameType | None) -> bool:
    """Tell whether a signal has interrupted a finalizer, where Python prints an exception and goes on without it."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code in _FINALIZERS:
            return True
        frame = frame.f_back
    return False


@contextmanager
def preemptible(accelerator: Accelerator, grace: Any, interrupts: bool) -> Iterator[Preemption]:
    """See `Accelerator.preemptible`.

    Raises:
        ValueError: where several processes can't agree.
        TypeError, ValueError: see `parse_duration`.
    """
    if accelerator.num_processes > 1 and accelerator.watchdog is None:
        raise ValueError(
            f"preemptible() in a run of {accelerator.num_processes} processes needs torch 2.8 or newer; this is "
            f"{torch.__version__}. Leave it out: signals then end the run as they do without Treadle."
        )
    seconds = None if grace is None else parse_duration("grace", grace).total_seconds()
    preemption = Preemption(accelerator, seconds)
    with preemption.watching(), preemption.catching_interrupts() if interrupts else nullcontext():
        preemption.departure.begin_loop()
        try:
            yield preemption
        finally:
            preemption.departure.end_loop()


def requeue_job() -> None:
    """Ask SLURM to run this job again, where SLURM runs it."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    try:
        result = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=_REQUEUE_LIMIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _say(f"job {job} is not requeued: {error}. Submit it again; ckpt_path='auto' goes on where it stopped.")
        return
    if result.returncode:
        _say(f"job {job} is not requeued: scontrol says {result.stderr.strip()!r}. Submit it with sbatch --requeue.")
    else:
        _say(f"job {job} is requeued")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # not by sys.stderr, which the signal may have interrupted
        os.write(2, f"treadle: {text}\n".encode())
