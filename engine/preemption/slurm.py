"""Setting of the signal after which a job is requeued, under Lightning's name."""

from __future__ import annotations

import os
import signal
from typing import Any

from ...common.validation import check_bool

_NAMES = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGTERM")  # submitit's jobs get SIGUSR2


class SLURMEnvironment:
    """Setting for ``Trainer(plugins=...)`` of the signal after which SLURM is asked to requeue the job.

    Treadle detects SLURM itself, so this changes nothing else. After each of these signals, a run saves and ends.

    Args:
        auto_requeue: Ask SLURM to requeue the job. Default: True.
        requeue_signal: The signal: ``signal.SIGUSR1``, ``SIGUSR2``, ``SIGHUP`` or ``SIGTERM``. Default: SIGUSR1.

    Raises:
        ValueError: If ``requeue_signal`` is another signal.
    """

    def __init__(self, auto_requeue: bool = True, requeue_signal: Any = None) -> None:
        self.auto_requeue = check_bool("auto_requeue", auto_requeue)
        allowed = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
        if requeue_signal not in (None, *allowed):
            raise ValueError(
                f"requeue_signal={requeue_signal!r} must be signal.SIGUSR1, SIGUSR2, SIGHUP or SIGTERM. Change it here "
                "and in sbatch --signal."
            )
        # Windows has no SIGUSR1.
        self.requeue_signal: signal.Signals | None = requeue_signal or getattr(signal, "SIGUSR1", None)

    @staticmethod
    def detect() -> bool:
        """Return whether SLURM has started this process as a task of a job."""
        return "SLURM_PROCID" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")


class LightningEnvironment(SLURMEnvironment):
    """Plugin that turns off requeueing in a SLURM job, for programs that pass it to keep Lightning from using SLURM.

    Treadle starts processes itself in any job that has not started several with srun, so this changes nothing else.
    """

    def __init__(self) -> None:
        super().__init__(auto_requeue=False)
