"""Fabric's throughput meter."""

from __future__ import annotations

from typing import Any

import torch

from ...callbacks._throughput import Throughput, get_available_flops
from .fabric import Fabric


class ThroughputMonitor(Throughput):
    """Throughput meter of a `Fabric`'s loop, which knows the world size and logs through the Fabric.

    It measures on rank zero. On other ranks, its methods have no effect and return empty dicts.

    Args:
        fabric: The Fabric.
        kwargs: Keyword arguments of `Throughput`, except ``available_flops`` and ``world_size``.
    """

    def __init__(self, fabric: Fabric, **kwargs: Any) -> None:
        precision = fabric.accelerator.precision
        dtype = precision.compute or precision.storage or torch.float32
        super().__init__(get_available_flops(fabric.device, dtype), fabric.world_size, **kwargs)
        self._fabric = fabric
        self.step = -1

    def update(self, **totals: Any) -> None:
        """See `Throughput.update`."""
        if self._fabric.is_global_zero:
            super().update(**totals)

    def compute(self) -> dict[str, float]:
        """See `Throughput.compute`."""
        return super().compute() if self._fabric.is_global_zero else {}

    def compute_and_log(self, step: int | None = None) -> dict[str, float]:
        """Log the results of `compute` through the Fabric, and return them.

        Args:
            step: Step at which they are logged. Default: one more than at the previous call, starting at 0.
        """
        self.step = self.step + 1 if step is None else step
        metrics = self.compute()
        if metrics:
            self._fabric.log_dict(metrics, self.step)
        return metrics
