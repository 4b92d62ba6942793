"""Factories of `World`."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch

from ...common.validation import check_int, choose
from ..launch import supervisor
from ..processes import die_with_parent, open_scratch
from .collective_debug import DebugWorld
from .devices import Devices, device_of, device_type, parse_devices
from .launch_environment import DebugEnvironment, LaunchEnvironment
from .world import World


def make_world(**place: Any) -> World:
    """Return a `World` or, with ``TREADLE_DEBUG=1``, a `DebugWorld`. The arguments are those of `World`."""
    return World(**place) if DebugEnvironment.read() is None else DebugWorld(**place)


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
            If both are ``"auto"``, Accelerate's variable ``ACCELERATE_TORCH_DEVICE`` sets the device of the process.
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
    requested = _read_requested_device() if accelerator == devices == "auto" else None
    kind = device_type(accelerator if requested is None else requested.type)
    if requested is not None and requested.index is None:
        requested = None  # it chooses the kind of device only
    launched = LaunchEnvironment.read()
    device_indices = parse_devices(kind, devices)
    if launched is None:
        if num_nodes != 1:
            raise ValueError(
                f"num_nodes={num_nodes} needs a launcher on every machine. Run `treadle launch --nnodes {num_nodes} "
                "--rdzv-endpoint HOST:PORT script.py` on each machine."
            )
        if requested is not None:
            return make_world(device=requested)
        if device_indices is None:
            count = torch.cuda.device_count() if kind == "cuda" and spread and supervisor.has_script() else 1
            device_indices = list(range(count))
        if len(device_indices) > 1:
            supervisor.relaunch(len(device_indices))
        return make_world(device=device_of(kind, device_indices[0]))
    if launched.supervisor is not None:
        die_with_parent(launched.supervisor)
    open_scratch(launched.supervisor or os.getppid())
    if device_indices is None:
        device_indices = list(range(launched.local_world_size))
    launched.check(devices, len(device_indices), num_nodes)
    visible_count = torch.cuda.device_count() if kind == "cuda" else None
    return make_world(
        rank=launched.rank,
        size=launched.world_size,
        local_rank=launched.local_rank,
        local_size=launched.local_world_size,
        node_rank=launched.node_rank,
        device=requested or device_of(kind, launched.device_index(device_indices, visible_count)),
        address=launched.address,
        run_id=launched.run_id,
        timeout=timeout,
        backend=backend,
    )


def _read_requested_device() -> torch.device | None:
    text = os.environ.get("ACCELERATE_TORCH_DEVICE")
    if not text:
        return None
    choose("ACCELERATE_TORCH_DEVICE", text.partition(":")[0], ("cpu", "cuda", "mps"))
    return torch.device(text)
