"""The processes as they are now, for functions that are given no World: torch's process group is what is known."""

from __future__ import annotations

import torch
import torch.distributed as dist

from . import process_group
from .launch_environment import LaunchEnvironment
from .open_world import make_world, open_world
from .watchdog import dismiss
from .world import World


def current_place() -> tuple[int, int, int]:
    """This process's rank, the number of processes, and its rank on its machine. Connects to nobody."""
    launched = LaunchEnvironment.read()
    if not dist.is_initialized():
        return (0, 1, 0) if launched is None else (launched.rank, launched.world_size, launched.local_rank)
    rank = dist.get_rank()
    return rank, dist.get_world_size(), rank if launched is None else launched.local_rank


def current_world(accelerator: str = "auto") -> World:
    """The processes of the group that is up; else those that a launcher started, connected now; else this one alone.

    Args:
        accelerator: what they compute on, where they have yet to be connected.
    """
    if not dist.is_initialized():
        return open_world(accelerator, spread=False)
    rank, size, local_rank = current_place()
    launched = LaunchEnvironment.read()
    return make_world(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=size if launched is None else launched.local_world_size,
        node_rank=0 if launched is None else launched.node_rank,
        device=_find_device(),
    )


def _find_device() -> torch.device:
    # A group for GPUs has a backend for them; one that was made for the CPU has not, on whatever machine.
    on_gpus = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")


def backend_of(world: World) -> str | None:
    """What carries the tensors between the processes; None where there are no others."""
    if world.size == 1:
        return None
    backends = dict(part.split(":") for part in dist.get_backend_config(world.group).split(","))
    return backends.get(world.device.type) or next(iter(backends.values()))


def disconnect() -> None:
    """End the process group, where there is one. The next World makes a new one."""
    dismiss()
    process_group.spare_lines.clear()
    if dist.is_initialized():
        process_group.await_gloo_threads()
        dist.destroy_process_group()


def abort() -> None:
    """Break off all collectives, and the process group with them. nccl's end waits for those that are under way."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def connected() -> bool:
    """Whether a process group is up."""
    return dist.is_initialized()
