"""Estimated duration of operations and collectives on GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter

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


aten = torch.ops.aten

ARITHMETIC, TRAFFIC, LAUNCHES = "arithmetic", "memory traffic", "launches"
"""Causes of an operation's duration, which are the keys of `Meter.spent`."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Corrections to the peak values in data sheets, and estimates of overheads and prediction errors.

    A tuple contains the values of the best, the most likely and the worst case.

    Args:
        arithmetic: Fraction of the peak performance that matrix products reach. ``benchmarks/plan.py`` fitted it to a
            published run on 8 H100s without compilation.
        fused: Fraction of the memory traffic that remains after compilation, for operations other than matrix products.
            It was fitted to the same run with compilation.
        launch: Minimum duration of an operation on a GPU, in seconds.
        host: Seconds that the host takes to launch an operation. This estimate has not been checked on a GPU.
        host_compiled: Fraction of the operations that the host still launches for a compiled model. This is an estimate
            too.
        straggler: Relative increase of the step time with each doubling of the number of processes beyond
            ``straggler_from``. In MosaicML's published runs on 128 to 512 H100 GPUs, each doubling reduced the
            throughput per GPU by 2.2 to 6.4 %.
        straggler_from: Number of processes up to which the step time does not increase.
        spread: Assumed relative error of predictions for steps like those of the published runs.
        spread_unchecked: Assumed relative error in all other cases. It is not derived from measurements.
        reserved: Memory that torch's allocator reserves, as a multiple of the peak.
    """

    arithmetic: float = 0.528
    fused: float = 0.505
    launch: float = 3e-6
    host: tuple[float, float, float] = (5e-6, 1e-5, 2e-5)
    host_compiled: tuple[float, float, float] = (0.2, 0.5, 1.0)
    straggler: float = 0.03
    straggler_from: int = 128
    spread: float = 0.05
    spread_unchecked: float = 0.25
    reserved: float = 1.25


# Operations without work. An operation that only reads a tensor's form is recognized by its schema.
_FREE = {
    aten.empty,
    aten.empty_like,
    aten.new_empty,
    aten.new_empty_strided,
    aten.empty_strided,
    aten.detach,
    aten.set_,
    aten.resize_,
    aten.lift_fresh,
    aten._unsafe_view,  # a view by its kernel, though not by its schema
}
_CONVOLUTIONS = {aten.convolution, aten._convolution, aten.convolution_backward}
# They access a few rows of a table, or a part of a buffer, not all of it.
_SPARSE = {aten.embedding, aten.gather, aten.index_select, aten.nll_loss_forward}


# torch's attention for the CPU, which torch does not count: the formula for a GPU's, and the number of its arguments.
_FORMULAS: dict[Any, tuple[Callable[..., int], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: (flop_counter.sdpa_flop_count, 3),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (flop_counter.sdpa_backward_flop_count, 4),
}


def _count_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_count_bytes(item) for item in value)
    return 0


def _get_dtype(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, Tensor) else None


class Prices:
    """Estimator of the durations and the FLOPs of operations on a GPU.

    Attributes:
        flops: Total FLOPs of matrix products, convolutions and attention since the last `Meter.begin`.
    """

    def __init__(self, gpu: GPU, calibration: Calibration, compiled: bool) -> None:
        self.gpu = gpu
        self.calibration = calibration
        self.traffic = calibration.fused if compiled else 1.0
        self.flops = 0
        self._free: dict[Any, bool] = {}

    def seconds(self, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[float, str]:
        """Count an operation's FLOPs, and return its duration in seconds and the cause, such as ``"arithmetic"``."""
        free = self._free.get(func)
        if free is None:
            free = self._free[func] = _is_free(func)
        if free:
            return 0.0, LAUNCHES
        packet = func._overloadpacket
        moved = self._count_moved_bytes(packet, args, kwargs, out) / self.gpu.bandwidth
        flops = self._count(packet, args, kwargs, out)
        computed = 0.0
        if flops:
            self.flops += flops
            computed = flops / (self._find_peak_flops(packet, args) * self.calibration.arithmetic)
        else:
            moved *= self.traffic
        return max((computed, ARITHMETIC), (moved, TRAFFIC), (self.calibration.launch, LAUNCHES))

    def _find_peak_flops(self, packet: Any, args: Any) -> float:
        first = next((dtype for arg in args if (dtype := _get_dtype(arg)) is not None), torch.float32)
        if first.itemsize < 4:
            return self.gpu.half
        if packet in _CONVOLUTIONS:
            rounded = torch.backends.cudnn.allow_tf32
        else:
            rounded = torch.get_float32_matmul_precision() != "highest"
        return self.gpu.tf32 if rounded else self.gpu.single

    def _count_moved_bytes(self, packet: Any, args: Any, kwargs: Any, out: Any) -> int:
        name = str(packet)
        if name == "fsdp.all_gather_copy_in":
            return 2 * _count_bytes(args[0])  # the result is the whole buffer, of which only a part is written
        if packet in _SPARSE:
            return 2 * _count_bytes(out)
        if packet is aten.embedding_dense_backward:
            return _count_bytes(args[0]) * 3 + _count_bytes(out)
        inputs = sum(_count_bytes(arg) for arg in args) + sum(_count_bytes(value) for value in kwargs.values())
        return inputs + _count_bytes(out)

    def _count(self, packet: Any, args: Any, kwargs: Any, out: Any) -> int:
        if packet in _FORMULAS:
            formula, count = _FORMULAS[packet]
            return int(formula(*(tensor.shape for tensor in args[:count])))
        counted = flop_counter.flop_registry.get(packet)
        if counted is None and str(packet) == "torch_nn._linear_cross_entropy_batch_chunked":
            inputs, weight, needs_gradient = args[0], args[1], args[12:14]  # which it computes along with the loss
            return 2 * inputs.numel() * len(weight) * (1 + sum(needs_gradient))
        return 0 if counted is None else int(counted(*args, **kwargs, out_val=out))


def _is_free(func: Any) -> bool:
    if func._overloadpacket in _FREE or func.namespace == "prim":  # the latter ask for a device or a layout
        return True
    returns = func._schema.returns
    # A view returns its input and writes nothing.
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
