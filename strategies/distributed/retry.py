"""Retry of a call on all processes. They exchange results through a store, in case a collective fails or hangs."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ...common.messages import named_ranks
from . import process_group
from .launch_environment import LaunchEnvironment
from .open_world import current_place, current_world
from .process_group import disconnect
from .tracebacks import PeerFailed

DONE, RETRY = "done", "retry"

_LOOK_EVERY = 0.5  # seconds


class Attempts:
    """Attempts of one call on all processes.

    The processes report their results through a store, because a failed process may leave the others waiting in a
    collective. When it closes its connections, the others' gloo collectives raise an error. NCCL collectives do not, so
    a thread in each process aborts them.
    ``patience`` is the maximum time that `start_over` waits for the reports of the other processes.
    """

    def __init__(self, patience: timedelta = timedelta(minutes=1)) -> None:
        self.patience = patience
        self.rank, self.size, _ = current_place()
        self._number = 0
        self._over = threading.Event()
        if self.size == 1:
            return
        launched = LaunchEnvironment.read()
        if launched is None:
            raise ValueError(
                "the processes were not started by a launcher that Treadle supports, so they can't be reconnected "
                "after a failure. Start them with torchrun or `treadle launch`."
            )
        self._device = current_world().device.type if dist.is_initialized() else None
        # Not the group's own connection to the store, because it ends with the group.
        limit = timedelta(minutes=30)
        store = process_group.meeting_place(self.rank, self.size, limit, launched.address)
        name = f"treadle/{launched.run_id}/calls"
        self._store = process_group.join_attempt(store, name, self.rank, self.size, limit)

    def begin(self) -> None:
        """Start a new attempt and, with GPUs, the thread that aborts collectives after another process has failed."""
        self._number += 1
        if self.size > 1 and torch.cuda.is_available():
            self._over = threading.Event()
            threading.Thread(target=self._abort_after_others, args=(self._over,), daemon=True).start()

    def report(self, outcome: str) -> None:
        """Report the result of this process's attempt: `DONE`, `RETRY`, or the text of an error."""
        self._over.set()
        if self.size > 1:
            self._store.set(f"{self._number}/{self.rank}", outcome)
            self._store.get(f"{self._number}/{self.rank}")  # now the other ranks can see it

    def someone_retries(self) -> bool:
        """Return whether another process has reported `RETRY`, without waiting."""
        return RETRY in self._read_reports()

    def _read_reports(self) -> list[str]:
        """Return the reports of the other processes that are already available."""
        names = [f"{self._number}/{rank}" for rank in range(self.size) if rank != self.rank]
        return [self._store.get(name).decode() for name in names if self._store.check([name])]

    def _abort_after_others(self, over: threading.Event) -> None:
        """Abort NCCL collectives if another process's attempt fails before this process's attempt ends."""
        while not over.wait(_LOOK_EVERY):
            if any(outcome != DONE for outcome in self._read_reports()):
                _abort_nccl()
                return

    def await_all_done(self) -> bool:
        """Wait for all reports, and return whether every process reported `DONE`. If False, another attempt is needed.

        Raises:
            PeerFailed: If a process reported an error.
        """
        return self.size == 1 or RETRY not in self._gather_outcomes(timedelta(days=365))

    def start_over(self) -> None:
        """Release the resources of the failed attempt, and reconnect the processes.

        Raises:
            RuntimeError: If a process reported an error, or does not report within ``patience``.
        """
        gc.collect()
        if self.size > 1:
            _cut_off_replicas()
            _abort_nccl()
            disconnect()
            gc.collect()
            self._gather_outcomes(self.patience)
            if self._device is not None:
                current_world(self._device)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _gather_outcomes(self, limit: timedelta) -> list[str]:
        """Wait for all reports, and return them. Raise an error if one is missing or reports an error."""
        names = [f"{self._number}/{rank}" for rank in range(self.size)]
        try:
            self._store.wait(names, limit)
        except (RuntimeError, dist.DistError):
            silent = [rank for rank, name in enumerate(names) if not self._store.check([name])]
            which = "This rank" if len(silent) == 1 else "These ranks"
            raise RuntimeError(
                f"{named_ranks(silent)} did not report the result of this attempt within {limit.total_seconds():g} s. "
                f"{which} may be waiting in a collective that can't be aborted."
            ) from None
        outcomes = [self._store.get(name).decode() for name in names]
        for rank, text in enumerate(outcomes):
            if text not in (DONE, RETRY):
                raise PeerFailed(f"rank {rank} failed: {text}")
        return outcomes


def _is_nccl() -> bool:
    return dist.is_initialized() and "nccl" in dist.get_backend_config()


def _abort_nccl() -> None:
    """Abort all NCCL collectives and the process group, whose destruction would wait for collectives in progress."""
    if _is_nccl():
        dist.distributed_c10d._abort_process_group()


def _cut_off_replicas() -> None:
    """Remove the process group from all existing `DistributedDataParallel` modules, which would keep it open."""
    for value in gc.get_objects():
        # By type, because isinstance would trigger proxies and lazy modules.
        if issubclass(type(value), DistributedDataParallel):
            for name in ("logger", "reducer", "process_group"):
                value.__dict__.pop(name, None)
