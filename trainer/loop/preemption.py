"""A signal that asks a run to end: the machine is wanted back, or the job's time is up."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from ...common.messages import announce, warn

if TYPE_CHECKING:
    from ..trainer import Trainer

# SIGHUP: the terminal has closed. Where processes get different signals, the one that stands last here counts.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGHUP", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
_REQUEUE_LIMIT = 30  # seconds; the scheduler's own limit for an answer is 10 by default


class Preempted(SystemExit):
    """A signal ended ``fit``, after the run was saved.

    The exit status is what a shell says of a program that the signal ended: 143 for SIGTERM, 129 for SIGHUP. It is 143
    for SIGUSR1 too, which schedulers send some time before SIGTERM.
    """


class Preemption:
    """Notes the first SIGTERM, SIGUSR1 or SIGHUP while training runs; the loop saves and leaves after the step.

    The handler only sets a flag, so a signal never breaks a step or a save, whether it comes once or again. On several
    processes the flag travels with the votes of each step: all leave after the same one, whoever got the signal.

    SIGUSR1 is what SLURM's ``--signal=USR1@90`` sends before a job's time is up: then the job is requeued too.

    Args:
        trainer: whose run it is.

    Attributes:
        caught: the signal this process got; None if none came.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.caught: signal.Signals | None = None
        self._trainer = trainer
        self._replaced: dict[signal.Signals, Callable[..., Any] | int] = {}
        self._pid = os.getpid()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Catch the signals in a block.

        A handler of the script's own is called too. Signals that are ignored stay so, and outside the main thread,
        where Python can't set handlers, nothing is caught. A signal that came after the last step ends the process, as
        it would have without Treadle.
        """
        self.caught, self._pid = None, os.getpid()
        agreement = self._trainer.accelerator.agreement
        agreement.signal_vote = agreement.signaled = False
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler is not None and handler is not signal.SIG_IGN:  # None: set by something that is not Python
                self._replaced[number] = handler
                signal.signal(number, self._note)
        try:
            yield
        finally:
            replaced, self._replaced = self._replaced, {}
            for number, handler in replaced.items():
                if signal.getsignal(number) == self._note:
                    signal.signal(number, handler)
        if self.caught is not None and not callable(replaced[self.caught]):
            signal.raise_signal(self.caught)

    def _note(self, number: int, frame: FrameType | None) -> None:
        caught = signal.Signals(number)
        if os.getpid() != self._pid:  # a child that was forked within fit
            if caught is signal.SIGTERM:  # from whoever started it, such as `Process.terminate`
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return  # to the whole process group; data workers are needed for the step in progress
        if self.caught is None:
            self.caught = caught
            self._trainer.accelerator.agreement.signal()
        handler = self._replaced.get(caught)
        if callable(handler):
            handler(number, frame)

    def leave(self) -> None:
        """Save the run, requeue the job if its time is up, and end. All ranks must call it.

        Raises:
            Preempted: always.
        """
        trainer = self._trainer
        rating = torch.tensor(-1 if self.caught is None else _SIGNALS.index(self.caught))
        caught = _SIGNALS[int(trainer.accelerator.world.all_reduce(rating, "max"))]
        saving = [c for c in trainer.checkpoint_callbacks if c.saves and not c.save_weights_only]
        step = trainer.progress.step
        if saving:
            path = saving[0].save_now(trainer)
            announce(
                f"{caught.name}: the run as of optimizer step {step} is saved as {path}; ckpt_path='auto' resumes it"
            )
        else:
            warn(f"{caught.name} ends the run at optimizer step {step}, and no ModelCheckpoint saves it.")
        if caught.name == "SIGUSR1":
            if trainer.is_global_zero:
                _requeue()
            caught = signal.SIGTERM
        raise Preempted(128 + caught)


def _requeue() -> None:
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
        warn(f"job {job} is not requeued: {error}. Submit it again; ckpt_path='auto' goes on where it stopped.")
        return
    if result.returncode:
        warn(f"job {job} is not requeued: scontrol says {result.stderr.strip()!r}. Submit it with sbatch --requeue.")
    else:
        announce(f"job {job} is requeued")
