"""Garbage collection when an Accelerator releases its objects: in `free_memory`, or before a stage if memory is short.

A Trainer and its task refer to each other. A Trainer that a script no longer uses therefore stays in memory, with its
optimizer state, until Python collects garbage. Python decides by the number of objects, not of bytes, so a collection
may start only after several fits of large models. A collection before each stage would take 0.2 to 0.7 s in a process
with many objects, which is longer than a short fit.
"""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

import torch

# Shares of the memory in use from which a collection is worthwhile. Main memory holds much besides the process's
# tensors, a device's memory nothing else.
DEVICE_SHARE = 1 / 8
HOST_SHARE = 1 / 4


def collect(device: torch.device) -> None:
    """Free unreachable objects, and release the memory that the device's allocator caches."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def is_memory_short(device: torch.device) -> bool:
    """Return whether this process uses more than 1/8 of the device's memory or 1/4 of main memory."""
    return _read_device_share(device) > DEVICE_SHARE or _read_resident_bytes() > HOST_SHARE * _read_main_memory()


def _read_device_share(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / torch.cuda.get_device_properties(device).total_memory
    return torch.mps.current_allocated_memory() / torch.mps.recommended_max_memory() if device.type == "mps" else 0.0


def _read_resident_bytes() -> int:
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _read_main_memory() -> int:
    """Return the size of main memory in bytes, or the container's memory limit (cgroup v2) if that is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # there is no limit
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total
