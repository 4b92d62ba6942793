"""Samplers and a stream dataset that yield the same samples as Accelerate's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from ..engine.rng import read_common_seed


def _check_split(batch_size: int | None, num_processes: int, owner: str) -> None:
    """Raise a ValueError if batches cannot be split evenly among the processes."""
    if batch_size is None:
        raise ValueError(
            f"split_batches=True needs a batch size, but {owner} has no batch_size. Set batch_size, or pass "
            "split_batches=False."
        )
    if batch_size % num_processes:
        valid = num_processes * math.ceil(batch_size / num_processes)
        raise ValueError(
            f"batch_size={batch_size} must be a multiple of num_processes={num_processes}, because split_batches=True "
            f"splits each batch among the processes. Use, for example, batch_size={valid}."
        )


class SeedableRandomSampler(RandomSampler):
    """Random sampler whose order depends only on a seed and the epoch. A complete pass advances the epoch.

    Args:
        args, kwargs: Arguments of torch's ``RandomSampler``. A ``generator`` is reseeded for each pass.
        data_seed: The seed of epoch 0. Default: the seed of torch's generator, which is the same on all ranks.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = read_common_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator(torch.get_default_device())
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """One rank's share of the batches of a batch sampler that is identical on all ranks.

    Args:
        batch_sampler: Batch sampler that yields lists of indices. Only its last batch may be short.
        num_processes: Number of ranks that share the batches. Default: 1.
        process_index: Rank of the share. Default: 0.
        split_batches: Whether the share is a slice of every batch instead of every ``num_processes``-th batch. Default:
            False.
        even_batches: Whether to fill the last batches with indices from the beginning, so that all ranks have the same
            number of batches. With False, a rank's last batch may be short or missing. Ignored if the batch sampler's
            ``drop_last`` is True. Default: True.

    Raises:
        ValueError: With ``split_batches``, if the batch size is unknown or not a multiple of ``num_processes``.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches:
            name = "the DataLoader" if batch_sampler is None else type(batch_sampler).__name__
            _check_split(self.batch_size, num_processes, name)

    @property
    def total_length(self) -> int:
        """Number of batches of the batch sampler, before they are distributed."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        if self.split_batches:
            return len(self.batch_sampler)
        rounds, rest = divmod(len(self.batch_sampler), self.num_processes)
        if not rest or self.drop_last:
            return rounds
        return rounds + (self.even_batches or self.process_index < rest)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._iter_slices() if self.split_batches else self._iter_rounds()

    def _iter_slices(self) -> Iterator[list[Any]]:
        assert self.batch_size is not None
        size = self.batch_size // self.num_processes
        mine = slice(size * self.process_index, size * (self.process_index + 1))
        first: list[Any] | None = None
        batch: list[Any] = []
        for batch in self.batch_sampler:
            first = batch if first is None else first
            if len(batch) == self.batch_size:
                yield batch[mine]
        if self.drop_last or not first or len(batch) >= self.batch_size:
            return
        if self.even_batches:
            batch = batch + list(itertools.islice(itertools.cycle(first), self.batch_size))
        if len(batch) > mine.start:
            yield batch[mine]

    def _is_complete(self, batch: list[Any]) -> bool:
        return self.batch_size is None or len(batch) == self.batch_size

    def _iter_rounds(self) -> Iterator[list[Any]]:
        count = self.num_processes
        first_round: list[list[Any]] = []
        mine: list[Any] | None = None  # kept until it is known that the round's last batch is complete
        index = -1
        batch: list[Any] = []
        for index, batch in enumerate(self.batch_sampler):
            if index < count:
                first_round.append(batch)
            if index % count == self.process_index:
                mine = batch
            if index % count == count - 1 and self._is_complete(batch):
                yield mine  # type: ignore[misc]
                mine = None
        if self.drop_last or not first_round:
            return
        if mine and (not self.even_batches or self._is_complete(mine)):
            yield mine
        if self.even_batches:
            yield from self._fill_round(index, batch, first_round)

    def _fill_round(self, index: int, batch: list[Any], first_round: list[list[Any]]) -> Iterator[list[Any]]:
        """Yield this rank's batch of the last round, if it has to be filled with indices from the beginning."""
        if self._is_complete(batch):
            index, batch = index + 1, []
        fill_batches = itertools.cycle(first_round)
        fill_indices = itertools.cycle([i for part in first_round for i in part] if self.batch_size is not None else [])
        while index % self.num_processes or batch:
            if self.batch_size is None:
                batch = next(fill_batches)
            else:
                batch = batch + list(itertools.islice(fill_indices, self.batch_size - len(batch)))
            if index % self.num_processes == self.process_index:
                yield batch
            index, batch = index + 1, []


class IterableDatasetShard(IterableDataset):  # type: ignore[type-arg]
    """One rank's share of a stream that is identical on all ranks.

    Args:
        dataset: The stream. A ``generator`` of a stream without ``set_epoch`` is seeded with the epoch before each
            pass.
        batch_size: Batch size per rank; with ``split_batches``, the global batch size. Default: 1.
        drop_last: Whether to skip samples after the last complete global batch, instead of filling the last batch with
            samples from the beginning. Default: False.
        num_processes: Number of ranks that share the stream. Default: 1.
        process_index: Rank of the share. Default: 0.
        split_batches: Whether ``batch_size`` is the global batch size. Default: False.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches:
            _check_split(batch_size, num_processes, "the DataLoader")
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of this share and, if its dataset has ``set_epoch``, of the dataset."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        batches = len(self.dataset) / (self.batch_size * self.num_processes)  # type: ignore[arg-type]
        return (math.floor(batches) if self.drop_last else math.ceil(batches)) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        share = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        total = self.batch_size if self.split_batches else self.batch_size * self.num_processes
        mine = slice(share * self.process_index, share * (self.process_index + 1))
        stream, first = iter(self.dataset), None
        while batch := list(itertools.islice(stream, total)):
            first = batch if first is None else first
            if len(batch) < total:
                if self.drop_last:
                    return
                batch += list(itertools.islice(itertools.cycle(first[:]), total - len(batch)))
            yield from batch[mine]


class SkipBatchSampler(BatchSampler):
    """Batch sampler that draws but does not yield the first ``skip_batches`` batches of another one."""

    def __init__(self, batch_sampler: BatchSampler, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[list[Any]]:
        return itertools.islice(iter(self.batch_sampler), self.skip_batches, None)

    @property
    def total_length(self) -> int:
        """Number of batches, including those that are skipped."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler) - self.skip_batches
