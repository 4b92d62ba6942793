"""Creation, settings and destruction of a run's process group."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...common import __version__
from ...common.messages import named_ranks
from ...common.open_files import allow_open_files
from ..processes import name_gloo_interface, read_stat
from .launch_environment import LaunchEnvironment
from .tracebacks import forget_store, report_uncaught

# Groups of all processes that Worlds created for threads running alongside the training, and no longer use, with their
# timeouts.
spare_lines: list[tuple[timedelta, dist.ProcessGroup]] = []
_comparison_groups: list[dist.ProcessGroup] = []
meetings: Counter[str] = Counter()  # number of times that all processes have met in each call of `World.meet`

_CONNECTING = timedelta(seconds=30)
_OTHER_FILES = 512  # open files of the datasets, the data workers and the libraries

_protected: list[bool] = []  # contains one entry once forks are protected
_at_disconnect: list[Callable[[], None]] = []


def connect(
    device: torch.device,
    rank: int,
    size: int,
    timeout: timedelta,
    address: tuple[str, int] | None = None,
    run_id: str = "",
    backend: str | None = None,
) -> None:
    """Join the process group of ``size`` processes as ``rank``, or check that an existing group matches.

    If ``address`` is None, MASTER_ADDR and MASTER_PORT are used. ``run_id`` separates runs with the same address.
    """
    if backend == "nccl" and device.type != "cuda":
        raise ValueError(f"backend='nccl' needs GPUs, but this process computes on {device.type}. Use backend='gloo'.")
    if dist.is_initialized() and backend is not None and backend not in dist.get_backend_config():
        raise ValueError(
            f"backend={backend!r}, but the existing process group uses {dist.get_backend_config()}. Remove backend."
        )
    if not dist.is_initialized():
        forget_groups()
        # gloo is kept beside nccl, so that objects and host tensors are exchanged without the GPU.
        if backend in (None, "nccl"):
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        # Its functions have the current group as default argument, whose sockets stay open (torch 2.11 to 2.13).
        import torch.distributed.nn.functional  # noqa: F401

        launched = LaunchEnvironment.read()
        if launched is not None and launched.world_size > launched.local_world_size:
            name_gloo_interface(os.environ.get("MASTER_ADDR", "") if address is None else address[0])
        # Each gloo group has a socket to every other process. Two groups of 512 ranks exceed the usual limit of 1,024.
        allow_open_files(4 * size + _OTHER_FILES)
        store = _join_store(rank, size, timeout, address, run_id)
        forget_store()
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        _protect_forks()
        if size > 1:
            _await_connections(store, size)
            report_uncaught(dist.PrefixStore("uncaught", store), rank, size)
        # The store is passed along: it ends with its last reference, and the next group's processes meet there again.
        atexit.unregister(disconnect_at_exit)  # registered with the previous group's store
        atexit.register(disconnect_at_exit, store)
    if (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise ValueError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} in the existing process group, but "
            f"rank {rank} of {size} in the launcher's variables. Initialize the group from these variables."
        )


def _join_store(rank: int, size: int, timeout: timedelta, address: tuple[str, int] | None, run_id: str) -> dist.Store:
    """Return the store over which the processes of a new group connect."""
    if size == 1:
        return dist.HashStore()  # needs neither an address nor a port
    store = meeting_place(rank, size, timeout, address)
    store = join_attempt(store, f"treadle/{run_id}/groups", rank, size, timeout)
    _check_versions(store, rank)
    return store


def _await_connections(store: dist.Store, size: int) -> None:
    """Wait at most 30 s until all processes are connected, because connecting to a rank that has ended would fail."""
    if store.add("connected", 1) == size:
        store.set("all connected", "")
    with contextlib.suppress(dist.DistError):  # a rank that failed in the meantime is reported elsewhere
        store.wait(["all connected"], _CONNECTING)


def forget_groups() -> None:
    """Discard what belongs to a process group that ends or has ended."""
    spare_lines.clear()
    _comparison_groups.clear()
    meetings.clear()


def comparison_group(timeout: timedelta) -> dist.ProcessGroup:
    """Return the group in which all worlds compare their calls in debug mode. Must be called on all ranks.

    It is separate, because a rank that has skipped a call exchanges something else in the group of the calls.
    """
    if not _comparison_groups:
        _comparison_groups.append(dist.new_group(None, timeout, "gloo"))
    return _comparison_groups[0]


def let_segments_grow() -> None:
    """Let torch's GPU allocator grow its segments on Linux, unless it is configured or already in use.

    Batches of varying sizes then fragment the memory less.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the old name, which torch still reads
    if sys.platform == "linux" and not torch.cuda.is_initialized() and not any(name in os.environ for name in names):
        os.environ[names[0]] = "expandable_segments:True"


def make_communicators(device: torch.device) -> None:
    """Create NCCL's connections now, because their errors would otherwise appear only in the first collective."""
    if device.type == "cuda" and "nccl" in dist.get_backend_config():
        dist.all_reduce(torch.zeros(1, device=device))


def _check_versions(store: dist.Store, rank: int) -> None:
    """Check that this process has rank zero's versions of torch and Treadle."""
    local_versions = f"torch {torch.__version__}, treadle {__version__}"
    if rank == 0:
        store.set("versions", local_versions)
    elif (rank_zero_versions := store.get("versions").decode()) != local_versions:
        raise ValueError(
            f"rank {rank} runs {local_versions} (on {socket.gethostname()}), but rank 0 runs {rank_zero_versions}. "
            "Install the same versions on all machines."
        )


def set_timeout(timeout: timedelta) -> None:
    """Set the time limit of collectives in the existing process group."""
    dist.distributed_c10d._set_pg_timeout(timeout)  # torch 2.13 has no public function for it


def existing_timeout(device: torch.device) -> timedelta | None:
    """Return the time limit of collectives in an existing process group; None without a group or a known limit."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    group: Any = dist.distributed_c10d._get_default_group()
    kinds = group._device_types
    kind = torch.device(device.type)
    backend = group._get_backend(kind if kind in kinds else kinds[0])
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)  # torch 2.13 has no public function for it
    return timeout if isinstance(timeout, timedelta) else None


def meeting_place(rank: int, size: int, timeout: timedelta, address: tuple[str, int] | None = None) -> dist.Store:
    """Return a new connection to a store that all processes of the run share.

    If ``address`` is None, MASTER_ADDR and MASTER_PORT are used.

    Raises:
        ValueError: If the address cannot be used.
        RuntimeError: If the connection fails for another reason, such as a rank zero that does not start in time.
    """
    if address is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # torch's own rendezvous would wait for all ranks, without naming the ones that are missing.
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if address is not None:
        return _meet(address, rank, timeout)
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    return store


def join_attempt(store: dist.Store, name: str, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Return a new section of the store, shared by all processes that call this function together.

    The store of torchrun's agent outlives the processes that the agent restarts (torch 2.4 to 2.13), so it may contain
    keys and counters of killed processes. Each other process therefore stores a random token. Rank zero responds to
    the token with the name of the section, and the process confirms the response.
    """
    token = uuid.uuid4().hex
    if rank == 0:
        _gather_processes(store, name, token, size, timeout)
        return dist.PrefixStore(f"{name}/{token}", store)
    store.set(f"{name}/{rank}", token)
    try:
        store.wait([f"{name}/for {token}"], timeout)
    except dist.DistStoreError:
        raise RuntimeError(
            f"rank 0 has not connected to rank {rank} within {timeout.total_seconds():g} s. Check whether rank 0 has "
            "started."
        ) from None
    part = dist.PrefixStore(f"{name}/{store.get(f'{name}/for {token}').decode()}", store)
    part.set(f"rank {rank}", "")
    part.add("ranks", 1)
    return part


def _gather_processes(store: dist.Store, name: str, token: str, size: int, timeout: timedelta) -> None:
    """Send rank zero's token to every other process until all have confirmed it."""
    part = dist.PrefixStore(f"{name}/{token}", store)
    answered: dict[int, bytes] = {}
    deadline = time.monotonic() + timeout.total_seconds()
    pause = 0.001
    while part.add("ranks", 0) < size - 1:
        if time.monotonic() > deadline:
            absent = [rank for rank in range(1, size) if not part.check([f"rank {rank}"])]
            verb, which = ("has", "this rank has") if len(absent) == 1 else ("have", "these ranks have")
            raise RuntimeError(
                f"{named_ranks(absent)} of {size} {verb} not connected to rank 0 within {timeout.total_seconds():g} s. "
                f"Check whether {which} started."
            )
        for rank in range(1, size):
            if part.check([f"rank {rank}"]) or not store.check([f"{name}/{rank}"]):
                continue
            theirs = store.get(f"{name}/{rank}")
            if theirs != answered.get(rank):
                store.set(f"{name}/for {theirs.decode()}", token)
                answered[rank] = theirs
        time.sleep(pause)
        pause = min(2 * pause, 0.02 + size / 5000)


def _meet(address: tuple[str, int], rank: int, timeout: timedelta) -> dist.TCPStore:
    host, port = address
    try:
        socket.getaddrinfo(host, port)  # torch would retry until the timeout
    except OSError as error:
        raise ValueError(
            f"the address of rank 0, {host!r}, can't be resolved on {socket.gethostname()} "
            f"({error.strerror or error}). Set MASTER_ADDR to the address of rank 0's machine."
        ) from None
    try:
        return dist.TCPStore(
            host, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except dist.DistNetworkError as error:
        if rank != 0:
            raise RuntimeError(
                f"rank {rank} can't reach rank 0 at {host}:{port} within {timeout.total_seconds():g} s. Check whether "
                "rank 0 has started, and whether this machine reaches that address."
            ) from error
        raise ValueError(
            f"rank 0 can't listen on port {port} ({error}). Set MASTER_PORT on all processes to a port that is "
            "free on rank 0's machine."
        ) from None


def on_disconnect(callback: Callable[[], None]) -> None:
    """Call a function once, before the process group and its store end."""
    _at_disconnect.append(callback)


def disconnect(keep_group: bool = False) -> None:
    """Call the functions of `on_disconnect` and destroy the process group, so that `connect` can create a new one."""
    while _at_disconnect:
        _at_disconnect.pop()()
    forget_groups()
    if dist.is_initialized() and not keep_group:
        await_gloo_threads()
        dist.destroy_process_group()


def disconnect_at_exit(store: dist.Store | None = None) -> None:
    """Disconnect at the end of the process. ``store`` is kept until then."""
    forget_store()
    # After an uncaught exception the other ranks may have ended, and a backend's shutdown would wait for them.
    disconnect(keep_group=hasattr(sys, "last_value"))
    await_gloo_threads()


def _protect_forks() -> None:
    """Delay forks while a gloo thread requests the GIL after a collective, for at most a second.

    A child that is forked at that moment may wait for a lock forever. CPython 3.12 fixes this
    (https://github.com/python/cpython/issues/112275).
    """
    if sys.version_info < (3, 12) and hasattr(os, "register_at_fork") and not _protected:
        _protected.append(True)
        os.register_at_fork(before=_await_rest)


def _await_rest() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        await_gloo_threads(looks=1)


def await_gloo_threads(limit: float = 1.0, looks: int = 3) -> None:
    """Wait until gloo's threads are idle, for at most ``limit`` seconds. Does nothing without ``/proc``.

    The threads must be idle in ``looks`` consecutive checks. A thread that is not idle may need the GIL to release a
    tensor. In this case, torch may abort when the interpreter exits (2.13).
    """
    tasks = Path("/proc/self/task")
    deadline, at_rest = time.monotonic() + limit, 0
    while tasks.exists() and at_rest < looks and time.monotonic() < deadline:
        time.sleep(0.002)  # releases the GIL, which they may be waiting for
        mine = str(threading.get_native_id())
        name, _ = read_stat(tasks / mine)
        others = [read_stat(task) for task in tasks.iterdir() if task.name != mine]
        # In torch 2.11 gloo's threads have the name of the thread that started them. "R": running or ready to run.
        states = [fields[:1] for other, fields in others if "gloo" in other or other == name]
        at_rest = 0 if ["R"] in states else at_rest + 1
