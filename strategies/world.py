"""Who am I among how many, on which device; and every exchange between processes."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only

from . import launch
from .messages import choose

Devices = int | str | Sequence[int]
ACCELERATORS = ("auto", "cpu", "cuda", "gpu", "mps")
_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """What a launcher (torchrun, ours, a Kubernetes job) says about this process.

    Raises:
        ValueError: if only a part of the variables is set, or one holds no valid number. A half-set environment
            would train N separate models that each believe to be alone.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    supervisor: int | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> LaunchEnvironment | None:
        """Read the launch variables; None when no launcher set any. The only place that reads them."""
        env = os.environ if environ is None else environ
        if not any(name in env for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
            return None
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if name not in env:
                given = ", ".join(f"{n}={env[n]}" for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if n in env)
                raise ValueError(
                    f"{name} is not set, but {given} is: a launch environment is complete or absent. "
                    "Start with torchrun, which sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, "
                    f"or unset {given.split('=')[0]}."
                )
        size = _number(env, "WORLD_SIZE", low=1)
        rank = _number(env, "RANK", low=0, high=size - 1)
        # A pod per process (PyTorchJob) sets no LOCAL_RANK: each process is alone on its node.
        local_size = _number(env, "LOCAL_WORLD_SIZE", low=1, high=size) if "LOCAL_WORLD_SIZE" in env else 1
        local_rank = _number(env, "LOCAL_RANK", low=0) if "LOCAL_RANK" in env else 0
        if local_rank >= local_size:
            said = f"={local_size}" if "LOCAL_WORLD_SIZE" in env else ", which is not set, so it counts as 1"
            raise ValueError(f"LOCAL_RANK={local_rank} must be below LOCAL_WORLD_SIZE{said}.")
        node = _number(env, "GROUP_RANK", low=0) if "GROUP_RANK" in env else rank // local_size
        supervisor = _number(env, "TREADLE_SUPERVISOR", low=1) if "TREADLE_SUPERVISOR" in env else None
        return cls(
            rank=rank,
            world_size=size,
            local_rank=local_rank,
            local_world_size=local_size,
            node_rank=node,
            supervisor=supervisor,
        )


def _number(env: Mapping[str, str], name: str, low: int, high: int | None = None) -> int:
    bounds = f"at least {low}" if high is None else f"from {low} to {high}"
    try:
        value = int(env[name])
    except ValueError:
        raise ValueError(f"{name}={env[name]!r} is not a whole number; it must be {bounds}.") from None
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}={value} is out of range; it must be {bounds}.")
    return value


class World:
    """The processes of this run, seen from one of them. A world of one answers every call at once.

    Args:
        rank: this process among all, from 0.
        size: number of processes.
        local_rank: this process among those of its machine.
        local_size: number of processes on its machine.
        node_rank: this machine among all.
        device: where this process computes.
        timeout: how long a collective may wait for the others before it fails.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        size: int = 1,
        local_rank: int = 0,
        local_size: int = 1,
        node_rank: int = 0,
        device: torch.device | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.node_rank = node_rank
        self.device = device or torch.device("cpu")
        self.timeout = timeout
        rank_zero_only.rank = rank  # type: ignore[attr-defined]
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if size > 1:
            self._connect()

    @classmethod
    def from_env(
        cls, accelerator: str = "auto", devices: Devices = "auto", num_nodes: int = 1, *, spread: bool = True
    ) -> World:
        """Find this process's place; start the missing processes when the user asked for several.

        Args:
            accelerator: ``"auto"``, ``"cpu"``, ``"cuda"`` (or ``"gpu"``), ``"mps"``.
            devices: how many, which (a list of indices or ``"0,2"``), ``-1`` for all, or ``"auto"``: what the launcher
                started; else all GPUs when ``spread``, else one.
            num_nodes: number of machines.
            spread: whether ``"auto"`` may use several GPUs.

        Raises:
            ValueError: when the flags contradict the environment or the machine.
        """
        kind = _device_type(accelerator)
        launched = LaunchEnvironment.read()
        wanted = _wanted_devices(kind, devices)
        if launched is None:
            if num_nodes != 1:
                raise ValueError(
                    f"num_nodes={num_nodes} needs a launcher on every machine: run "
                    f"`torchrun --nnodes {num_nodes} --nproc-per-node N --rdzv-endpoint HOST:PORT script.py` on each."
                )
            if wanted is None:
                count = torch.cuda.device_count() if kind == "cuda" and spread and launch.has_script() else 1
                wanted = list(range(count))
            if len(wanted) > 1:
                launch.relaunch(len(wanted))
            return cls(device=_device(kind, wanted[0]))
        if launched.supervisor is not None:
            launch.die_with_parent(launched.supervisor)
        if wanted is None:
            wanted = list(range(launched.local_world_size))
        if len(wanted) != launched.local_world_size:
            raise ValueError(
                f"devices={devices!r} asks for {len(wanted)} process(es) on each machine, but the launcher started "
                f"{launched.local_world_size} (LOCAL_WORLD_SIZE). Use devices='auto', or start as many."
            )
        nodes = launched.world_size // launched.local_world_size
        if num_nodes not in (1, nodes):
            raise ValueError(f"num_nodes={num_nodes}, but the launcher started {nodes} machine(s).")
        return cls(
            rank=launched.rank,
            size=launched.world_size,
            local_rank=launched.local_rank,
            local_size=launched.local_world_size,
            node_rank=launched.node_rank,
            device=_device(kind, wanted[launched.local_rank]),
        )

    def _connect(self) -> None:
        if not dist.is_initialized():
            # gloo stays beside nccl, so that objects and host tensors travel without touching the GPU.
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=self.timeout)
            atexit.register(_disconnect)
        if (dist.get_rank(), dist.get_world_size()) != (self.rank, self.size):
            raise ValueError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} in the process group that is "
                f"already initialised, but rank {self.rank} of {self.size} by its environment."
            )

    @property
    def is_main(self) -> bool:
        """Whether this process is rank zero."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.size > 1:
            dist.barrier()

    def all_reduce(self, tensor: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        """Combine ``tensor`` over all processes, in place.

        Args:
            tensor: any shape, the same on every process.
            operation: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
        """
        op = _OPERATIONS[choose("operation", operation, _OPERATIONS)]
        if self.size > 1:
            dist.all_reduce(tensor, op)
            if operation == "mean":
                tensor.div_(self.size) if tensor.is_floating_point() else tensor.floor_divide_(self.size)
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor) -> dist.Work | None:
        """Begin to sum ``tensor`` over all processes, in place; wait on what is returned before reading it."""
        return dist.all_reduce(tensor, async_op=True) if self.size > 1 else None

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensor of every process, in rank order; shapes must agree."""
        if self.size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return parts

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the value of every process, in rank order, on every process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return process ``source``'s value on every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source)
        return box[0]

    def broadcast_tensor(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrite ``tensor`` with process ``source``'s, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=source)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` holds on at least one process. All processes must ask."""
        if self.size == 1:
            return flag
        return bool(self.all_reduce(torch.tensor(int(flag)), "max").item())

    def all(self, flag: bool) -> bool:
        """Whether ``flag`` holds on every process. All processes must ask."""
        return not self.any(not flag)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that every process enters; none leaves it before all are through, and all fail if one does."""
        error: BaseException | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        self.raise_together(error)

    def raise_together(self, error: BaseException | None) -> None:
        """Raise on every process if any failed: its own error where it happened, a named one elsewhere.

        Raises:
            RuntimeError: on the processes that did not fail, with the rank and the words of the first that did.
        """
        if self.size > 1:
            errors = self.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
            failed = [(rank, text) for rank, text in enumerate(errors) if text is not None]
            if failed and error is None:
                raise RuntimeError(f"rank {failed[0][0]} failed: {failed[0][1]}")
        if error is not None:
            raise error


def _disconnect() -> None:
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


def _device_type(accelerator: str) -> str:
    choose("accelerator", accelerator, ACCELERATORS)
    if accelerator == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    kind = "cuda" if accelerator == "gpu" else accelerator
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"accelerator={accelerator!r} but torch sees no CUDA device. Use accelerator='cpu' or 'auto'.")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ValueError("accelerator='mps' but torch sees no MPS device. Use accelerator='cpu' or 'auto'.")
    return kind


def _device(kind: str, index: int) -> torch.device:
    return torch.device("cuda", index) if kind == "cuda" else torch.device(kind)


def _wanted_devices(kind: str, devices: Devices) -> list[int] | None:
    """The device indices of this machine's processes, or None to leave it to the launcher."""
    rule = "devices must be a number of at least 1, -1 for all, a list of indices, a string such as '0,2', or 'auto'"
    if devices == "auto":
        return None
    if isinstance(devices, str):
        try:
            indices = [int(part) for part in devices.split(",") if part.strip()]
        except ValueError:
            raise ValueError(f"devices={devices!r}: {rule}.") from None
        devices = indices if "," in devices else indices[0] if indices else 0
    if isinstance(devices, bool) or not isinstance(devices, int | Sequence):
        raise TypeError(f"devices={devices!r} is a {type(devices).__name__}: {rule}.")
    available = torch.cuda.device_count() if kind == "cuda" else None
    if isinstance(devices, int):
        if devices == -1:
            devices = available or 1
        if devices < 1:
            raise ValueError(f"devices={devices}: {rule}.")
        chosen = list(range(devices))
    else:
        chosen = [*devices]  # type: ignore[list-item]
    if any(isinstance(index, bool) or not isinstance(index, int) or index < 0 for index in chosen):
        raise ValueError(f"devices={devices!r}: {rule}.")
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"devices={devices!r} names no device or one twice: {rule}.")
    if available is not None and max(chosen) >= available:
        raise ValueError(f"devices={devices!r} but torch sees {available} CUDA device(s), numbered from 0.")
    if kind == "mps" and len(chosen) > 1:
        raise ValueError(f"devices={devices!r}, but there is one MPS device.")
    return chosen
