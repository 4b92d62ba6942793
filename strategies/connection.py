"""The process group: made once, and ended so that no process aborts at exit."""

from __future__ import annotations

import atexit
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def connect(device: torch.device, rank: int, size: int, timeout: timedelta) -> None:
    """Join the process group of ``size`` processes as ``rank``, or check that the one that is there is this one.

    Raises:
        ValueError: if a group is there in which this process is another rank.
    """
    if not dist.is_initialized():
        # gloo stays beside nccl, so that objects and host tensors travel without touching the GPU.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if size > 1:
            dist.init_process_group(backend, timeout=timeout)
        else:  # nobody to meet: no address and no port is needed
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        atexit.register(disconnect)
    if (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise ValueError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} in the process group that is "
            f"already initialised, but rank {rank} of {size} by its environment."
        )


def disconnect() -> None:
    # After an uncaught exception the other ranks may be gone, and a backend's shutdown would wait for them.
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
    _await_gloo_threads()


def _await_gloo_threads(limit: float = 1.0) -> None:
    """Let gloo's threads put down what they hold, for at most ``limit`` seconds.

    DistributedDataParallel keeps the process group, and so these threads, beyond its destruction. One that lets go of
    a tensor while the interpreter ends asks for the GIL and aborts the process ("terminate called without an active
    exception", exit status 134), after all its work was done: seen in 1 of 6 runs of torch 2.13 on two busy cores.
    """
    tasks = Path("/proc/self/task")
    deadline, at_rest = time.monotonic() + limit, 0
    while tasks.exists() and at_rest < 3 and time.monotonic() < deadline:
        time.sleep(0.002)  # without the GIL, which they may be waiting for
        states = [_thread_state(task) for task in tasks.iterdir()]
        at_rest = 0 if "R" in states else at_rest + 1


def _thread_state(task: Path) -> str:
    """``"R"`` for one of gloo's threads that runs or wants to; ``""`` for one that is not gloo's, or is gone."""
    try:
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:
        return ""
    return rest.split()[0] if "gloo" in name else ""
