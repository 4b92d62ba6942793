"""Estimated duration of collectives, with the constants of NCCL."""

from __future__ import annotations

import math

from .gpus import GPU

# Microseconds of a call, of a hop within a machine, and of a hop between machines. Source: NCCL's tuning.cc, ring, its
# protocols Simple and LL128 (the latter within one machine only, because NCCL does not use it on InfiniBand).
_SIMPLE, _LL128 = (8.4, 3.4, 14.0), (14.0, 1.9, 4.0)
_LL128_SHARE = 120 / 128  # 8 of 128 bytes are flags
_TREE_SHARE = 0.92  # share of a ring's bandwidth, from the same file
# A ring between machines does not use all ports at the same time. torch's inductor measured on H100 machines with RoCE,
# for 50 MB, the bandwidth of one port, and more for larger messages (torch 2.13, _inductor/comm_analysis.py).
_PORTS_AT, _PORTS_POWER = 50e6, 0.17
_FEW_MACHINES = 0.77  # share of it between two machines; it rises to the whole between eight

STEPS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1, "broadcast": 1}
"""Number of times that each byte goes around the ring, by kind of collective."""


def estimate_collective_seconds(kind: str, size: int, ranks: tuple[int, ...], gpu: GPU) -> float:
    """Estimate the duration of a collective in seconds, from the time at which all ``ranks`` are ready.

    Rank ``r`` is on machine ``r // gpu.per_machine``. ``size`` is the size of the full tensor in bytes, such as the
    output of an all-gather.
    """
    count = len(ranks)
    if count == 1:
        return 0.0
    machines = len({rank // gpu.per_machine for rank in ranks})
    around = STEPS[kind]
    hops, crossing = around * (count - 1), around * (machines - 1) if machines > 1 else 0
    if machines == 1:
        forms = [(_SIMPLE, hops, 0, gpu.link), (_LL128, hops, 0, gpu.link * _LL128_SHARE)]
    else:
        rate = min(gpu.link, _compute_network_bandwidth(size, machines, count, gpu))
        forms = [(_SIMPLE, hops - crossing, crossing, rate)]
        if kind == "all_reduce":  # up a tree and down again: few hops, whereas in a large ring the latency dominates
            within, between = 2 * (math.ceil(count / machines) - 1), 2 * math.ceil(math.log2(machines))
            forms.append((_SIMPLE, within, between, rate * _TREE_SHARE))
    moved = around * (count - 1) / count * size
    return min(
        1e-6 * (call + near * inside + far * outside) + moved / rate
        for (call, near, far), inside, outside, rate in forms
    )


def _compute_network_bandwidth(size: int, machines: int, count: int, gpu: GPU) -> float:
    """Return the bandwidth of a ring through several machines, in bytes per second."""
    rate = gpu.network * (_FEW_MACHINES + (1 - _FEW_MACHINES) * min(1.0, (machines - 1) / 7))
    ports = min(gpu.per_machine, math.ceil(count / machines))
    if machines > 2 and ports > 1:  # a ring with one rank per machine has one port
        rate *= min(ports, (max(size, _PORTS_AT) / _PORTS_AT) ** _PORTS_POWER)
    return rate
