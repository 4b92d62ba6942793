"""Signals that ask a run to save and leave: the step in progress ends on all ranks, the run is saved, and exits."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from ...common.messages import announce, warn

if TYPE_CHECKING:
    from ..trainer import Trainer

# SIGUSR1 is what SLURM's --signal sends by habit, some time before the end. A terminal that closes sends SIGHUP.
_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGHUP")


class Preemption:
    """While entered, notes such a signal and does nothing else. A handler of the user's own stays in its place.

    Attributes:
        number: the first signal that came; 0 for none.
    """

    def __init__(self) -> None:
        self.number = 0
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Preemption:
        self.number, self._pid = 0, os.getpid()
        if threading.current_thread() is threading.main_thread():  # no other thread may
            for number in [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]:
                handler = signal.getsignal(number)
                # Under nohup SIGHUP stays ignored. The handler of a run that has left does nothing any more.
                if handler is signal.SIG_DFL or getattr(handler, "__func__", None) is Preemption._note:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self.number:
            return  # the process ends, and another such signal may not break that off
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a data worker, which this was forked into
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.number = self.number or number


def leave_if_asked(trainer: Trainer) -> None:
    """Save and leave if some rank was asked to. Call it on all ranks, between two steps.

    Raises:
        SystemExit: with 128 + the signal's number; SIGUSR1 counts as the SIGTERM that it announces.
    """
    number = int(trainer.accelerator.world.all_reduce(torch.tensor(trainer.preemption.number), "max"))
    if not number:
        return
    name, step = signal.Signals(number).name, trainer.progress.step
    saving = next((c for c in trainer.checkpoint_callbacks if c.saves and not c.save_weights_only), None)
    path = "" if saving is None else saving.save_before_leaving(trainer)
    if saving is None:
        warn(f"{name}: the run ends after optimizer step {step}, and no ModelCheckpoint saves it.")
    else:
        announce(f"{name}: the run as of optimizer step {step} is saved as {path}")
    raise SystemExit(128 + (signal.SIGTERM if name == "SIGUSR1" else number))
