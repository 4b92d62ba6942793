"""Lightning's classes and functions for distributed samplers and for DDP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

from ...strategies import iter_tensors

__all__ = ["UnrepeatedDistributedSampler", "UnrepeatedDistributedSamplerWrapper", "prepare_for_backward"]


def prepare_for_backward(model: DistributedDataParallel, output: Any) -> None:
    """Make DDP reduce the gradients of a loss that its ``forward`` did not compute, except within ``no_sync``.

    Args:
        model: The ``DistributedDataParallel`` module.
        output: Output from which the loss is computed. With ``find_unused_parameters`` and without ``static_graph``,
            its tensors determine which parameters take part.
    """
    model.require_forward_param_sync = bool(torch.is_grad_enabled() and model.require_backward_grad_sync)
    if model.require_forward_param_sync:
        traced = model.find_unused_parameters and not model.static_graph
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward(list(iter_tensors(output)) if traced else [])


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


class UnrepeatedDistributedSamplerWrapper(UnrepeatedDistributedSampler):
    """`UnrepeatedDistributedSampler` of the samples that another sampler yields.

    Args:
        sampler: Sampler, which must have a length and yield the same samples on every rank.
        args, kwargs: See ``torch.utils.data.DistributedSampler``.
    """

    def __init__(self, sampler: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        self._yielded = YieldedSamples(sampler)
        super().__init__(self._yielded, *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        self._yielded.values = list(self._yielded.sampler)
        return (self._yielded[index] for index in super().__iter__())


class YieldedSamples(Dataset[Any]):
    """Dataset of the samples that a sampler yields in an epoch."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.values: list[Any] = []

    def __getitem__(self, index: int) -> Any:
        return self.values[index]

    def __len__(self) -> int:
        return len(self.sampler)
