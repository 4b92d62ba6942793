"""Devices that a device map can name, their free memory, and sizes as text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from ...common.byte_sizes import parse_bytes
from ...common.messages import join_words, nearest

Device = int | str | torch.device
"""Device in a device map: an accelerator's number, ``"cpu"``, ``"disk"``, or anything that ``torch.device`` accepts."""


def format_bytes(size: int) -> str:
    """Return a number of bytes as text, such as ``"1.50 GB"``."""
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6), ("kB", 3)):
        if size >= 10**power:
            return f"{size / 10**power:.2f} {unit}"
    return f"{size} B"


def accelerators() -> tuple[str, int]:
    """Return the type of this machine's accelerators, such as ``"cuda"``, and their number; ``("", 0)`` for none."""
    count = torch.accelerator.device_count()
    current = torch.accelerator.current_accelerator() if count else None
    return (current.type, count) if current is not None else ("", 0)


def resolve(device: Device, subject: str = "", storage: bool = False) -> torch.device:
    """Return the torch device for a value of a device map other than ``"disk"``.

    Args:
        device: The value, such as ``0``, ``"cuda:1"`` or ``"cpu"``.
        subject: The argument and its value, for the error. Default: ``device=...``.
        storage: Whether the error lists ``"disk"`` as a valid value.

    Raises:
        ValueError: If the value is invalid or names a device that this machine does not have.
    """
    subject = subject or f"device={device!r}"
    kind, count = accelerators()
    available = join_words([*map(str, range(count)), "'cpu'"])
    if device == "disk":
        raise ValueError(f"{subject} can't compute anything, because it only stores weights. Use {available}.")
    try:
        if isinstance(device, int) and not isinstance(device, bool):
            torch_device = torch.device(kind or "cuda", device)
        else:
            torch_device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        hint = nearest(str(device), ["cpu", "disk"] if storage else ["cpu"])
        valid = join_words([*map(str, range(count)), "'cpu'", *["'disk'"] * storage])
        raise ValueError(f"{subject} is not a valid device. Use {valid}.{hint}") from error
    if torch_device.type in ("cpu", "meta"):
        return torch_device
    if torch_device.type != kind or (torch_device.index or 0) >= count:
        raise ValueError(
            f"{subject} does not exist on this machine. Use {available}. To plan for another machine, name its "
            "devices 'meta:0', 'meta:1', ..."
        )
    return (
        torch_device
        if torch_device.index is not None
        else torch.device(kind, torch.get_device_module(kind).current_device())
    )


def is_accelerator(device: Device) -> bool:
    """Return whether a value of a device map is neither ``"cpu"`` nor ``"disk"``.

    Args:
        device: The value, such as ``0``, ``"cuda:1"`` or ``"cpu"``.
    """
    return str(device).partition(":")[0] not in ("cpu", "disk")


def get_max_memory(max_memory: Mapping[Device, int | str] | None = None) -> dict[Device, int]:
    """Return the memory of each device in bytes: accelerators first, then ``"cpu"``, then ``"disk"``.

    Args:
        max_memory: Sizes by device, as a number of bytes or as text such as ``"10GiB"``. Devices that are not listed
            are not returned. To plan for another machine, name its devices ``"meta:0"``, ``"meta:1"`` and so on.
            Default: the free memory of each accelerator and the free main memory (on macOS, the total main memory).

    Raises:
        ValueError: If a size or device is invalid.
    """
    if max_memory is None:
        kind, count = accelerators()
        free: dict[Device, int] = {number: _read_free_bytes(kind, number) for number in range(count)}
        return {**free, "cpu": available_memory()}
    for device in max_memory:
        if device != "disk":
            resolve(device, f"the max_memory key {device!r}", storage=True)
    sizes = {device: parse_bytes(size, f"max_memory[{device!r}]") for device, size in max_memory.items()}
    last = {"cpu": 1, "disk": 2}
    return dict(sorted(sizes.items(), key=lambda item: last.get(str(item[0]).partition(":")[0], 0)))


def _read_free_bytes(kind: str, number: int) -> int:
    module = torch.get_device_module(kind)
    if hasattr(module, "mem_get_info"):
        return int(module.mem_get_info(number)[0])
    return int(module.recommended_max_memory() - module.driver_allocated_memory())  # mps


def available_memory() -> int:
    """Return the free main memory in bytes; on macOS, the total main memory.

    On Linux, the result is at most the memory left within the limit of the container (cgroup v2).
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    except (OSError, StopIteration):
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass  # no limit can be read
    return free
