"""Examination without a launcher: Treadle starts ranks on this machine, which examine themselves."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from ..launch import supervisor
from .examination import MARGIN, Report, examine_without_ranks

_GRACE = 2.0  # seconds; the ranks have nothing to save


def choose_ranks() -> tuple[int, str]:
    """Return the number of ranks to start, and their device: one per GPU if there are several, else two on the CPU."""
    gpus = torch.cuda.device_count()
    return (gpus, "cuda") if gpus > 1 else (2, "cpu")


def examine_own_ranks(
    nproc: int, build_command: Callable[[str], list[str]], run_folder: str | Path, limit: float
) -> Report:
    """Start ranks that examine themselves, and return their report, or a report on this process if they write none.

    ``build_command`` receives a path and returns the command that starts a rank. The rank that publishes the report
    writes it to this path as JSON. ``limit`` is the number of seconds that each rank waits for other ranks; see
    `examine`.
    """
    with tempfile.TemporaryDirectory(prefix="treadle-doctor-") as folder:
        path = Path(folder) / "report.json"
        # The ranks observe their limits themselves, unless they do not even start.
        longest = 2 * (2 * limit + MARGIN) + MARGIN  # two parts
        timer = threading.Timer(longest, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()
        try:
            status = supervisor.supervise(nproc, build_command(str(path)), grace=_GRACE)
        except OSError as error:
            return examine_without_ranks(run_folder, [f"{nproc} ranks could not be started: {error}"])
        finally:
            timer.cancel()
        if path.exists():
            report: Report = json.loads(path.read_text(encoding="utf-8"))
            return report
    ending = f"did not end within {longest:g} s" if status == 128 + signal.SIGTERM else f"ended with status {status}"
    return examine_without_ranks(
        run_folder, [f"the {nproc} ranks started for the examination {ending} and wrote no report"]
    )
