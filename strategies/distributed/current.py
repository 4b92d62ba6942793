"""Access to the current process group and its `World`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import process_group
from .launch_environment import LaunchEnvironment
from .open_world import open_world
from .watchdog import dismiss
from .world import World


def current_place() -> tuple[int, int, int]:
    """Return this process's rank, the world size, and this process's rank on its machine, without connecting.

    If a process group exists but there are no launch variables, all processes count as processes of one machine.
    """
    launched = LaunchEnvironment.read()
    if not dist.is_initialized():
        return (0, 1, 0) if launched is None else (launched.rank, launched.world_size, launched.local_rank)
    rank = dist.get_rank()
    return rank, dist.get_world_size(), rank if launched is None else launched.local_rank


def current_world(accelerator: str = "auto") -> World:
    """Return the world of the process group, else that of the launcher's processes, else that of this process alone.

    Args:
        accelerator: One of `ACCELERATORS`, used if there is no process group. Default: ``"auto"``.

    Raises:
        ValueError: If ``accelerator`` or the launch variables are invalid.
        RuntimeError: If the other processes do not connect within the timeout.
    """
    if not dist.is_initialized():
        return open_world(accelerator, spread=False)
    rank, size, local_rank = current_place()
    launched = LaunchEnvironment.read()
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=size if launched is None else launched.local_world_size,
        node_rank=0 if launched is None else launched.node_rank,
        device=_find_device(),
    )


def _find_device() -> torch.device:
    # A group for GPUs has a backend for them; a group for the CPU has none, even on a machine with GPUs.
    on_gpus = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")


def backend_of(world: World) -> str | None:
    """Return the name of the backend that transfers tensors on the world's device; None with a world size of one."""
    if world.size == 1:
        return None
    backends = dict(part.split(":") for part in dist.get_backend_config(world.group).split(","))
    return backends.get(world.device.type) or next(iter(backends.values()))


def disconnect() -> None:
    """Stop the watchdog and destroy the process group, if there is one."""
    dismiss()
    process_group.forget_groups()
    if dist.is_initialized():
        process_group.await_gloo_threads()
        dist.destroy_process_group()


def abort() -> None:
    """Abort all collectives and the process group. Destroying an NCCL group would wait for collectives in progress."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def connected() -> bool:
    """Return whether a process group exists."""
    return dist.is_initialized()
