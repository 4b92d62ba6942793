"""How single samples are read: in workers, each from a random state of its own; in this process, for less."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset


class SeededSamples:
    """A dataset whose every sample is drawn from a random state of its own. Used inside loader workers only.

    The seed follows from the epoch and the sample's position in it, so a resume, or another number of workers or
    processes, sees the same augmentations; and a sample drawn twice in an epoch is augmented in two ways.
    """

    def __init__(self, dataset: Any) -> None:
        self.__dict__["dataset"] = dataset
        if _reads_in_bulk(dataset):
            self.__dict__["__getitems__"] = self._get_items

    def __getitem__(self, item: tuple[int, int, Any]) -> Any:
        self._seed(item)
        return self.dataset[item[2]]

    def _get_items(self, items: list[tuple[int, int, Any]]) -> Any:
        self._seed(items[0])  # it reads them together, so they can only be seeded together
        return self.dataset.__getitems__([index for _, _, index in items])

    @staticmethod
    def _seed(item: tuple[int, int, Any]) -> None:
        # An odd multiplier spreads neighbouring positions over the 63 bits (Knuth, TAOCP 3.3.4: MMIX's constant).
        seed = (item[0] + item[1] * 6364136223846793005) % 2**63
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A worker_init_fn that opens a file puts it on `get_worker_info().dataset`.
        setattr(self.dataset, name, value)


def _reads_in_bulk(dataset: Any) -> bool:
    # A Subset only hands `__getitems__` on, and reads one by one where the dataset in it has none.
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def read_here(loader: DataLoader[Any]) -> Iterator[Any]:
    """What torch's iterator yields without workers, for less: it marks each batch for the profiler, asked for or not.

    The step of `benchmarks/overhead.py` goes from 1.08 to 1.03 of the raw loop's time with it.
    """
    # The seed for workers that are not there: torch draws it all the same, and so do we, or the order would differ.
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    return _read_here(loader)


def _read_here(loader: DataLoader[Any]) -> Iterator[Any]:
    dataset, collate = loader.dataset, loader.collate_fn
    if loader.batch_sampler is None:
        for index in loader.sampler:
            yield collate(dataset[index])
        return
    in_bulk = getattr(dataset, "__getitems__", None)
    for indices in loader.batch_sampler:
        yield collate(in_bulk(indices) if in_bulk else [dataset[index] for index in indices])
