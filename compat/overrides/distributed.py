"""Lightning's sampler for evaluation on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from ...common.lazy_exports import lazy_exports

__all__ = ["UnrepeatedDistributedSampler"]

__getattr__ = lazy_exports(__name__)[0]  # the names that the tables have


class UnrepeatedDistributedSampler(DistributedSampler[Any]):
    """Sampler for evaluation that yields every ``num_replicas``-th sample, starting with the sample at index ``rank``.

    With ``shuffle``, which is True by default, the samples are shuffled first. The number of samples may differ by one
    between ranks.

    Args:
        args, kwargs: See ``torch.utils.data.DistributedSampler``. ``seed`` and ``drop_last`` have no effect.

    Raises:
        ValueError: If an argument is invalid, or this rank would get no sample.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.total_size = len(self.dataset)  # type: ignore[arg-type]
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))
        if self.total_size and not self.num_samples:
            raise ValueError(
                f"rank {self.rank} gets no samples, because num_replicas={self.num_replicas} exceeds the length of the "
                f"dataset, {self.total_size}. Use a smaller num_replicas."
            )

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.total_size))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.epoch)
            order = torch.randperm(self.total_size, generator=generator).tolist()
        return iter(order[self.rank :: self.num_replicas])
