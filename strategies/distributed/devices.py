"""Devices of this machine that a run uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...common.messages import name_type
from ...common.validation import choose

Devices = int | str | Sequence[int]
ACCELERATORS = ("auto", "cpu", "cuda", "gpu", "mps")


def device_type(accelerator: str) -> str:
    """Return the kind of device for a value of ``accelerator``: ``"cpu"``, ``"cuda"`` or ``"mps"``."""
    choose("accelerator", accelerator, ACCELERATORS)
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind = "cuda" if accelerator == "gpu" else accelerator
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"accelerator={accelerator!r}, but torch sees no CUDA device. Use 'cpu' or 'auto'.")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ValueError("accelerator='mps', but torch sees no MPS device. Use 'cpu' or 'auto'.")
    return kind


def device_of(kind: str, index: int) -> torch.device:
    """Return the torch device of a kind. The index is ignored for kinds other than CUDA."""
    return torch.device("cuda", index) if kind == "cuda" else torch.device(kind)


def parse_devices(kind: str, devices: Devices) -> list[int] | None:
    """Return the device index of each process of this machine, or None for ``"auto"``.

    A string without a comma is a number of devices. -1 means all GPUs, or one device of another kind.
    """
    rule = "must be a number of at least 1, -1 for all, a list of indices, a string such as '0,2', or 'auto'"
    requested = devices
    # Only the caller knows how many processes the launcher has started.
    if devices == "auto":
        return None
    if isinstance(devices, str):
        try:
            indices = [int(part) for part in devices.split(",") if part.strip()]
        except ValueError:
            raise ValueError(f"devices={devices!r} {rule}.") from None
        devices = indices if "," in devices else indices[0] if indices else 0
    if isinstance(devices, bool) or not isinstance(devices, int | Sequence):
        raise TypeError(f"devices={devices!r} {rule}, not {name_type(devices)}.")
    available = torch.cuda.device_count() if kind == "cuda" else None
    if isinstance(devices, int):
        if devices == -1:
            devices = available or 1
        if devices < 1:
            raise ValueError(f"devices={requested!r} {rule}.")
        chosen = list(range(devices))
    else:
        chosen = [*devices]  # type: ignore[list-item]
    if any(isinstance(index, bool) or not isinstance(index, int) or index < 0 for index in chosen):
        raise ValueError(f"devices={requested!r} {rule}.")
    # NCCL refuses two ranks on one GPU.
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"devices={requested!r} must list at least one device, and each device only once.")
    if available is not None and max(chosen) >= available:
        raise ValueError(
            f"devices={requested!r} needs the CUDA device with index {max(chosen)}, but torch sees only "
            f"{'index 0' if available == 1 else f'indices 0 to {available - 1}'}. Use devices=-1, which "
            "selects every device that torch sees."
        )
    if kind == "mps" and len(chosen) > 1:
        raise ValueError(f"devices={requested!r}, but a machine has only one MPS device. Use devices=1.")
    return chosen
