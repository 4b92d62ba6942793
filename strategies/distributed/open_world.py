"""Factories of `World`."""

from __future__ import annotations

import os
from datetime import timedelta
from enum import Enum

import torch
import torch.distributed as dist

from ...common.messages import announce
from ...common.validation import check_int, choose, parse_truth
from ..launch import supervisor
from ..processes import die_with_parent, open_scratch
from .devices import Devices, device_of, device_type, parse_devices
from .launch_environment import LaunchEnvironment
from .world import World


def open_world(
    accelerator: str = "auto",
    devices: Devices = "auto",
    num_nodes: int = 1,
    *,
    spread: bool = True,
    timeout: timedelta | None = None,
    backend: str | None = None,
) -> World:
    """Return the `World` of this process. With several devices and no launcher, start one process per device.

    Args:
        accelerator: ``"auto"``, ``"cpu"``, ``"cuda"`` (or ``"gpu"``), or ``"mps"``. Default: ``"auto"``.
        devices: A number, indices (a list or ``"0,2"``), ``-1`` for all GPUs, or ``"auto"``. Default: ``"auto"``, which
            uses one device per process of the launcher or, without a launcher, one device or all GPUs (see ``spread``).
            With one device, each of the processes that another call has started runs alone.
        num_nodes: Number of machines. With a launcher, 1 stands for any number. Default: 1.
        spread: Let ``"auto"`` use all CUDA GPUs if there is no launcher and the script can be run again. Default: True.
        timeout: Maximum time that a collective waits. Default: that of an existing process group, or 30 minutes.
        backend: Torch communication backend, such as ``"gloo"``. Default: gloo for host memory and NCCL for GPUs.

    Raises:
        ValueError, TypeError: If an argument is invalid, or contradicts the environment or the machine.
        RuntimeError: If the other processes do not connect within the timeout.
        SystemExit: After the processes that this call started have ended.
    """
    check_int("num_nodes", num_nodes, 1)
    kind, requested = _choose_device(accelerator, devices)
    launched = LaunchEnvironment.read()
    device_indices = parse_devices(kind, devices)
    if launched is None:
        device_indices = _choose_devices(kind, device_indices, num_nodes, spread and requested is None)
        return World(device=requested or device_of(kind, device_indices[0]))
    if launched.supervisor is not None:
        die_with_parent(launched.supervisor)  # one that SIGKILL ended cannot end its ranks, which would keep the GPUs
    open_scratch(launched.supervisor or os.getppid())  # under torchrun, the parent of all ranks of this machine
    ranks = list(range(launched.local_world_size))
    is_alone = launched.relaunched and device_indices is not None and len(device_indices) == num_nodes == 1
    if not is_alone:
        launched.check(devices, len(device_indices or ranks), num_nodes)
    visible_count = torch.cuda.device_count() if kind == "cuda" else None
    index = launched.device_index(ranks if is_alone else device_indices or ranks, visible_count)
    device = requested or device_of(kind, index)
    if is_alone:
        if launched.rank == 0:
            announce(f"devices={devices!r}: each of the {launched.world_size} processes of this script runs alone")
        return World(device=device)
    return World(
        rank=launched.rank,
        size=launched.world_size,
        local_rank=launched.local_rank,
        local_size=launched.local_world_size,
        node_rank=launched.node_rank,
        device=device,
        address=launched.address,
        run_id=launched.run_id,
        timeout=timeout,
        backend=backend,
    )


def _choose_devices(kind: str, device_indices: list[int] | None, num_nodes: int, spread: bool) -> list[int]:
    """Return this process's device without a launcher. If there are several, start one process for each instead."""
    if num_nodes != 1:
        raise ValueError(
            f"num_nodes={num_nodes} needs a launcher on every machine. Run `treadle launch --nnodes {num_nodes} "
            "--rdzv-endpoint HOST:PORT script.py` on each machine."
        )
    if device_indices is None:
        uses_all = kind == "cuda" and spread and supervisor.has_script()
        device_indices = list(range(torch.cuda.device_count() if uses_all else 1))
    if len(device_indices) > 1:
        supervisor.relaunch(len(device_indices))
    return device_indices


def _choose_device(accelerator: str, devices: Devices) -> tuple[str, torch.device | None]:
    """Return the kind of device, and the device that Accelerate's variable ``ACCELERATE_TORCH_DEVICE`` sets, or None.

    ``ACCELERATE_USE_CPU=true`` sets the kind. An argument other than ``"auto"`` overrides both variables.
    """
    cpu = "cpu" * parse_truth("ACCELERATE_USE_CPU", os.environ.get("ACCELERATE_USE_CPU", "no"))
    text = os.environ.get("ACCELERATE_TORCH_DEVICE", cpu) if accelerator == devices == "auto" else ""
    if not text:
        return device_type(accelerator), None
    choose("ACCELERATE_TORCH_DEVICE", text.partition(":")[0], ("cpu", "cuda", "mps"))
    device = torch.device(text)
    return device_type(device.type), None if device.index is None else device


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


def connected() -> bool:
    """Return whether a process group exists."""
    return dist.is_initialized()


class DistributedType(str, Enum):  # noqa: UP042 - printed with the class's name
    """Kind of distributed training. Treadle uses ``NO``, ``MULTI_CPU``, ``MULTI_GPU`` or ``FSDP``.

    The other values exist only for comparisons in scripts.

    Examples:
        >>> import treadle as tl
        >>> from treadle.utils import DistributedType
        >>> tl.Accelerator(cpu=True).distributed_type == DistributedType.NO
        True
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


def distributed_type(world: World, sharded: bool) -> DistributedType:
    """Return the `DistributedType` of a run."""
    if sharded:
        return DistributedType.FSDP
    if world.size == 1:
        return DistributedType.NO
    return DistributedType.MULTI_GPU if world.device.type == "cuda" else DistributedType.MULTI_CPU
