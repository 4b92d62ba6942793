"""Asynchronous reading of numbers from a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .logged_values import stack_numbers


class LateNumbers:
    """Asynchronous reader of numbers that a CUDA device may still be computing.

    Reading the latest numbers at each refresh of a progress bar would wait for all work queued on the device.
    """

    def __init__(self) -> None:
        self._known: dict[str, float] = {}
        self._coming: tuple[list[str], Tensor, torch.cuda.Event] | None = None

    def read(self, values: dict[str, Any]) -> dict[str, float]:
        """Return ``values`` as numbers by name; if one is on a CUDA device, those of the last completed copy.

        Args:
            values: Numbers or 0-d tensors by name.
        """
        if not any(isinstance(value, Tensor) and value.is_cuda for value in values.values()):
            return {name: float(value) for name, value in values.items()}
        if self._coming is not None and self._coming[2].query():
            names, on_host, _ = self._coming
            self._known, self._coming = dict(zip(names, on_host.tolist(), strict=True)), None
        if self._coming is None:
            on_device = stack_numbers(list(values.values()))
            on_host = torch.empty(on_device.shape, dtype=on_device.dtype, device="cpu", pin_memory=True)
            on_host.copy_(on_device, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._coming = list(values), on_host, event
        return {name: number for name, number in self._known.items() if name in values}
