"""Outcome of a trial, determined from its process and its run folder."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

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
