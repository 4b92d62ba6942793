"""What a sweep tells the process of a trial, in an environment variable. Nothing here waits for torch."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...strategies.processes import die_with_parent

VARIABLE = "TREADLE_TRIAL"
"""The environment variable by which a sweep tells a process which trial it runs."""


@dataclass(frozen=True)
class Assignment:
    """What a sweep tells the process of a trial.

    Attributes:
        folder: the trial's run folder; a run in another folder is none of the sweep's.
        scheduler: the process that has started it. When that dies, the trial saves and ends.
        metric, mode, take: the value that counts.
        storage, study, number: where the trial is stored; empty without a pruner, which alone needs it.
        pruner: the pruner's kind and options.
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
        """Return the environment variable that holds all of it."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def read(cls) -> Assignment | None:
        """Return what this process was told; None if it is no trial's."""
        text = os.environ.get(VARIABLE)
        return None if text is None else cls(**json.loads(text))


def follow_scheduler() -> None:
    """Have this process, if it is a trial's, end with the process that has started it. Call it before anything else."""
    if (assignment := Assignment.read()) is not None:
        die_with_parent(assignment.scheduler, signal.SIGTERM)
