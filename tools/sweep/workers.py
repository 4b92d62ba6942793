"""Processes of the trials: their start, supervision and termination, and the outcome of a trial."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from queue import Empty, SimpleQueue

from ...strategies.distributed import without_launch_variables
from ...strategies.launch import cpus
from ...strategies.processes import kill_session
from ...trainer.runs import holder, index

OUTPUT = "output.log"
_TAIL = 20  # lines of a process's output that are shown
_MOST_BYTES = 2**16
# Signals that end a process for reasons other than its trial: a user or the system needs the memory or the machine.
_CUT_SHORT = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}


class End(Enum):
    """Kind of a trial's end, or the reason why the trial has not ended."""

    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"
    CUT_SHORT = "cut short"  # the trial is to be continued
    ELSEWHERE = "elsewhere"  # another process runs the trial


@dataclass(frozen=True)
class Outcome:
    """Outcome of a trial, with the value of the metric or the error.

    Attributes:
        error: The error of a failed trial, or the reason why a trial was cut short; otherwise, empty.
        steps: Optimizer steps taken; 0 if unknown.
    """

    end: End
    value: float | None = None
    error: str = ""
    steps: int = 0


def judge(folder: Path, status: int | None = None) -> Outcome:
    """Return the outcome of a trial, determined from its run folder and, if known, the exit status of its process."""
    if holder(folder) is not None:
        return Outcome(End.ELSEWHERE)
    try:
        run = index.read(folder)
    except ValueError as error:
        return Outcome(End.CUT_SHORT, error=str(error))
    steps = int(run.facts.get("steps", 0))
    if status is not None and (ended_by := _find_signal(status)) is not None:
        return Outcome(End.CUT_SHORT, error=f"{ended_by.name} ended the process", steps=steps)
    if run.state == "pruned":
        return Outcome(End.PRUNED, steps=steps)
    if status == 0 or run.state == "finished":  # a run that had nothing left to train does not write it again
        value = _read_value(run)
        if value is not None and math.isfinite(value):
            return Outcome(End.COMPLETE, value, steps=steps)
        metric = run.facts.get("objective", {}).get("metric", "the metric")
        return Outcome(End.FAILED, error=f"{metric} is {'missing' if value is None else value}", steps=steps)
    if status is None and not run.state.startswith("failed"):
        return Outcome(End.CUT_SHORT, error=f"the run was {run.state}", steps=steps)
    if run.state.startswith("failed"):
        words = str(run.facts.get("error") or run.state.removeprefix("failed: "))
    else:  # the process did not reach the point at which a run records its errors
        words = f"the process ended with status {status}:\n{read_tail(folder)}"
    return Outcome(End.FAILED, error=words, steps=steps)


def _find_signal(status: int) -> signal.Signals | None:
    """Return the signal in ``_CUT_SHORT`` that killed a process or made it save and exit; None for any other status."""
    number = -status if status < 0 else status - 128
    return signal.Signals(number) if number in set(_CUT_SHORT) else None


def _read_value(run: index.Run) -> float | None:
    objective = run.facts.get("objective")
    return None if objective is None else float(objective["value"])


def read_tail(folder: Path) -> str:
    """Return the end of the output of a trial's processes, or a note that it is unreadable."""
    try:
        with (folder / OUTPUT).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _MOST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"(no output: {error.strerror})"
    return "\n".join(lines[-_TAIL:])


@dataclass(frozen=True)
class Worker:
    """Process that runs a trial.

    Attributes:
        trial: The trial's number in the study.
        slot: The index of the slot that the trial occupies, from 0. It selects the trial's GPUs.
        began: Time at which the process was started, in seconds of ``time.monotonic``.
    """

    trial: int
    folder: Path
    slot: int
    process: subprocess.Popen[bytes]
    began: float


class Workers:
    """Processes of the trials that run at the same time.

    Each process runs in its own POSIX session, so Ctrl-C at the terminal reaches only the sweep, which asks the trials
    to save and exit. With a ``count`` above 1, the trials share the machine's ``gpus``.
    """

    def __init__(self, count: int, devices: int = 1, gpus: Sequence[str] | None = None) -> None:
        self.count, self.devices, self.gpus = count, devices, gpus
        self.running: dict[int, Worker] = {}
        self._events: SimpleQueue[int | None] = SimpleQueue()

    @property
    def has_room(self) -> bool:
        """Return whether one more trial may start."""
        return len(self.running) < self.count

    def start(self, trial: int, folder: Path, command: Sequence[str], variables: Mapping[str, str]) -> Worker:
        """Start the process of a trial. The process's output is appended to ``output.log`` in the run folder.

        Call this method on the main thread: a trial ends with its parent, and Linux regards the thread that started the
        process as the parent.
        """
        taken = {worker.slot for worker in self.running.values()}
        slot = next(slot for slot in range(self.count) if slot not in taken)
        environment = {**without_launch_variables(os.environ), **self._share_machine(slot), **variables}
        with (folder / OUTPUT).open("ab") as output:
            process = subprocess.Popen(
                list(command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        worker = self.running[trial] = Worker(trial, folder, slot, process, time.monotonic())
        threading.Thread(target=self._await, args=(worker,), name=f"trial {trial}", daemon=True).start()
        return worker

    def _await(self, worker: Worker) -> None:
        worker.process.wait()
        self._events.put(worker.trial)

    def _share_machine(self, slot: int) -> dict[str, str]:
        """Return the environment variables that give a slot its share of the CPUs and GPUs."""
        shares: dict[str, str] = {}
        if self.count > 1 and not os.environ.get("OMP_NUM_THREADS"):
            shares["OMP_NUM_THREADS"] = str(max(1, cpus() // (self.count * self.devices)))
        if self.count > 1 and self.gpus:
            shares["CUDA_VISIBLE_DEVICES"] = ",".join(share_gpus(self.gpus, self.count, slot))
        return shares

    def wake(self) -> None:
        """Make `wait` return. May be called by a signal handler."""
        self._events.put(None)

    def wait(self, seconds: float | None) -> Worker | None:
        """Wait until a worker's process ends, and return the worker; None after the timeout or a call of `wake`."""
        try:
            trial = self._events.get(timeout=seconds)
        except Empty:
            return None
        return None if trial is None else self.running.pop(trial)

    def end(self, number: signal.Signals) -> None:
        """Send a signal to the process of every running trial. SIGKILL is sent to child processes, too."""
        for worker in self.running.values():
            if number is signal.SIGKILL:
                kill_session(worker.process.pid)
            else:
                with contextlib.suppress(ProcessLookupError):
                    worker.process.send_signal(number)


def share_gpus(gpus: Sequence[str], count: int, slot: int) -> list[str]:
    """Return the GPUs of one of ``count`` slots: an equal share, or one GPU if there are fewer GPUs than slots."""
    if len(gpus) < count:
        return [gpus[slot % len(gpus)]]
    each = len(gpus) // count
    return list(gpus[slot * each : (slot + 1) * each])
