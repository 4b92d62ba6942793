"""Processes of the trials: their start, supervision and termination."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from ...strategies.distributed import without_launch_variables
from ...strategies.launch import cpus
from ...strategies.processes import kill_session
from .outcome import OUTPUT


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
