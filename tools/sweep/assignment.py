"""Assignment of a trial to its process, passed in an environment variable.

As a program, this module runs the command of a trial, which then ends with its scheduler.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...strategies.processes import die_with_parent

VARIABLE = "TREADLE_TRIAL"
"""Environment variable that passes the assignment."""


@dataclass(frozen=True)
class Assignment:
    """Trial that a sweep assigns to a process.

    Attributes:
        scheduler: Process ID of the scheduler.
        mode: ``"min"`` if a lower value of the metric is better, ``"max"`` if a higher value is.
        take: ``"best"`` if the best logged value of the metric is the trial's result, ``"last"`` if the last one is.
        storage: URL of the study's storage; empty without a pruner.
        number: Number of the trial in the study, from 0.
        pruner: The pruner's kind and options; empty without a pruner.
    """

    folder: str
    scheduler: int
    metric: str
    mode: str
    take: str
    storage: str = ""
    study: str = ""
    number: int = 0
    pruner: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> dict[str, str]:
        """Return the environment variable that passes the assignment to the trial's process."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def read(cls) -> Assignment | None:
        """Return the assignment of this process; None if it does not run a trial."""
        text = os.environ.get(VARIABLE)
        return None if text is None else cls(**json.loads(text))


def follow_scheduler(command: Sequence[str]) -> list[str]:
    """Return the command that runs ``command`` in a process that Linux sends SIGTERM when the scheduler dies."""
    return [sys.executable, "-m", __spec__.name, *command]


if __name__ == "__main__":
    assignment = Assignment.read()
    assert assignment is not None
    die_with_parent(assignment.scheduler, signal.SIGTERM)  # also applies to the program that replaces this one
    os.execvp(sys.argv[1], sys.argv[1:])
