"""Measurements between the ranks: clock offsets, and the speed of an all-reduce."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from ...common.messages import named_ranks
from ..distributed import World, backend_of

_ROUNDS = 7  # measurements of the clocks; their median is robust to a rank that is delayed in one of them
_SMALL, _MEDIUM, _LARGE = 2, 2**18, 2**23  # float32 values: 8 bytes, 1 MiB, 32 MiB
_QUICK = 0.1  # seconds for the medium tensor; if it takes longer, the large one would take too long


def measure_clocks(world: World) -> list[float]:
    """Return the number of seconds by which each rank's clock is ahead of rank zero's.

    Ranks do not leave a barrier at exactly the same time, which limits the accuracy.
    """
    rounds = []
    for _ in range(_ROUNDS):
        dist.barrier(**_get_barrier_device(world))
        rounds.append(_gather_times(world))
    return [statistics.median(times[rank] - times[0] for times in rounds) for rank in range(world.size)]


def _get_barrier_device(world: World) -> dict[str, Any]:
    # Passed explicitly, because nccl otherwise guesses it from the rank, which is wrong if each rank sees only its
    # device.
    return {"device_ids": [world.device.index]} if world.device.type == "cuda" else {}


def _gather_times(world: World) -> list[float]:
    return world.gather_objects(time.time())


def measure_all_reduce(world: World) -> dict[str, Any]:
    """Return the backend, latency in seconds and bus bandwidth in bytes per second of an all-reduce.

    Bus bandwidth is the data rate of each link in a ring: 2 (n - 1) / n times the tensor's size in bytes, divided by
    the duration in seconds, where n is the world size.

    Returns:
        A dict with ``"backend"``, ``"latency"``, ``"bandwidth"`` and ``"bytes"``, the size of the tensor used to
        measure the bandwidth.
    """
    _check_sum(world)
    latency = _time_all_reduce(world, _SMALL, repeats=20)
    seconds, length = _time_all_reduce(world, _MEDIUM, repeats=3), _MEDIUM
    if seconds < _QUICK:  # the same on all ranks, because `_time_all_reduce` returns the slowest rank's time
        seconds, length = _time_all_reduce(world, _LARGE, repeats=3), _LARGE
    moved = 4 * length * 2 * (world.size - 1) / world.size
    return {
        "backend": backend_of(world),
        "latency": latency,
        "bandwidth": moved / seconds,
        "bytes": 4 * length,
    }


def _check_sum(world: World) -> None:
    values = torch.full((_MEDIUM,), float(world.rank + 1), device=world.device)
    dist.all_reduce(values)
    expected = world.size * (world.size + 1) / 2
    wrong = world.gather_objects(int((values != expected).sum()))
    if any(wrong):  # on all ranks, because a rank that left alone would leave the others waiting
        ranks = named_ranks([rank for rank, count in enumerate(wrong) if count])
        sums = "wrong sum" if max(wrong) == 1 else "wrong sums"
        raise ArithmeticError(f"an all-reduce of {_MEDIUM} values returned up to {max(wrong)} {sums} on {ranks}")


def _time_all_reduce(world: World, length: int, repeats: int) -> float:
    """Return the median duration of an all-reduce in seconds, on the rank where it is longest."""
    tensor = torch.zeros(length, device=world.device)
    times = []
    for attempt in range(repeats + 2):  # two of them as a warm-up
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        if attempt >= 2:
            times.append(time.perf_counter() - begin)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64, device="cpu")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
