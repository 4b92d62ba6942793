"""Peak performance and memory of GPUs, and typical bandwidths of their links and networks."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from ...common.validation import choose


@dataclass(frozen=True, kw_only=True)
class GPU:
    """GPU model in a typical machine. Rates are per second.

    Args:
        name: Short name, such as ``"h100"``.
        half: FLOPs of matrix products in float16 or bfloat16, without sparsity.
        tf32: FLOPs of matrix products in TF32; equal to ``single`` if the GPU does not support TF32.
        single: FLOPs in float32.
        bandwidth: Memory bandwidth in bytes.
        memory: Memory size in bytes.
        link: Bandwidth of a ring within a machine in each direction, in bytes (NCCL's bus bandwidth).
        network: The GPU's share of the machine's network bandwidth in each direction, in bytes.
        per_machine: Number of GPUs in a machine. Default: 8.
    """

    name: str
    half: float
    tf32: float
    single: float
    bandwidth: float
    memory: float
    link: float
    network: float
    per_machine: int = 8


# Peaks and memory: NVIDIA's data sheets. Links: the values per GPU in NCCL's topo.h. Network: one port per GPU, as in
# the usual machines (DGX, HGX): 200 Gb/s with the A100, 400 Gb/s since then.
_TABLE: dict[str, tuple[float, ...]] = {
    # in 1e12 operations: half, TF32, float32; TB/s and GiB of memory; GB/s of the link and of the network
    "v100": (125, 15.7, 15.7, 0.9, 32, 120, 12.5),
    "a100-40gb": (312, 156, 19.5, 1.555, 40, 240, 25),
    "a100": (312, 156, 19.5, 2.039, 80, 240, 25),
    "l40s": (362, 183, 91.6, 0.864, 48, 24, 12.5),
    "a10g": (70, 35, 31.5, 0.6, 24, 12, 6.25),
    "rtx4090": (165, 82.6, 82.6, 1.008, 24, 12, 3),
    "h100": (989, 494, 66.9, 3.35, 80, 370, 50),
    "h100-96gb": (989, 494, 66.9, 2.4, 96, 370, 50),  # from torchtitan's published runs: HBM2e, 500 W
    "h200": (989, 494, 66.9, 4.8, 131.3, 370, 50),
    "b200": (2250, 1125, 75, 8, 167.6, 720, 50),
}


def _make_gpu(
    name: str, half: float, tf32: float, single: float, speed: float, size: float, link: float, net: float
) -> GPU:
    return GPU(
        name=name,
        half=half * 1e12,
        tf32=tf32 * 1e12,
        single=single * 1e12,
        bandwidth=speed * 1e12,
        memory=size * 2**30,
        link=link * 1e9,
        network=net * 1e9,
    )


GPUS = {name: _make_gpu(name, *numbers) for name, numbers in _TABLE.items()}
# Words in a driver's name that denote another device with the same chip.
_OTHERS = {"laptop", "mig", "nvl", "pcie"}


def find_gpu(name: str | GPU) -> GPU:
    """Return a GPU by name, such as ``"h100"``. A `GPU` is returned unchanged; an unknown name raises a ValueError."""
    if isinstance(name, GPU):
        return name
    return GPUS[choose("gpu", name.lower().replace("_", "-"), GPUS)]


def detect_gpu() -> GPU | None:
    """Return this machine's GPU, with the memory size that the driver reports; None without a GPU that is in `GPUS`."""
    if not torch.cuda.is_available():
        return None
    gpu = match_driver_name(torch.cuda.get_device_name())
    return gpu and replace(gpu, memory=float(torch.cuda.get_device_properties(0).total_memory))


def match_driver_name(name: str) -> GPU | None:
    """Return the GPU for a driver's device name, such as ``"NVIDIA H100 80GB HBM3"``; None if it is unknown."""
    words = re.findall("[a-z0-9]+", name.lower().replace("rtx 4090", "rtx4090"))
    if _OTHERS & set(words):
        return None
    matches = (gpu for gpu in GPUS.values() if set(gpu.name.split("-")) <= set(words))
    return max(matches, key=lambda gpu: len(gpu.name), default=None)
