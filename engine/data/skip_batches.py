"""Iteration over an epoch without its first batches."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ...common.validation import check_int
from .loader import Loader


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return an iterable over the current epoch of ``dataloader`` without its first ``num_batches`` batches.

    A shuffled ``DataLoader`` that is not prepared draws a new order. To get the remaining samples of an interrupted
    epoch, restore the RNG state from which that epoch's order was drawn. For the following epochs, iterate
    over ``dataloader`` itself.

    For a prepared dataloader, ``num_batches`` is counted from the beginning of the epoch. Batches that
    `Accelerator.load_state` has already skipped are therefore not skipped twice.

    Args:
        dataloader: A prepared dataloader, a ``DataLoader``, or any other iterable of batches.
        num_batches: Number of batches that each process has already trained on. Default: 0.

    Raises:
        ValueError: If ``num_batches`` is not an integer of at least 0.
    """
    count = check_int("num_batches", num_batches, 0)
    if hasattr(type(dataloader), "skip_first_batches"):  # a loader that iterates in its own way without an Accelerator
        return dataloader.skip_first_batches(count)
    return SkippedLoader(dataloader, count)


class SkippedLoader:
    """Iterable over one epoch of a loader without its first batches; other attributes are looked up in the loader."""

    def __init__(self, loader: Any, skipped: int) -> None:
        self.loader = loader
        self.skipped = skipped

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.loader, Loader):
            return iter(self.loader) if self.loader.start_at(self.skipped) else iter(())
        return _skip_batches(self.loader, self.skipped)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.skipped)

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)


def _skip_batches(loader: Iterable[Any], count: int) -> Iterator[Any]:
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or batches is None or isinstance(loader.dataset, IterableDataset):
        # The batches are read and discarded, because nothing else is known about the loader.
        return itertools.islice(loader, count, None)
    view = copy.copy(loader)
    settings = view.__dict__  # a DataLoader refuses to set these by name after its construction
    settings["_iterator"] = None
    settings["batch_sampler"] = itertools.islice(batches, count, None)  # read once, as the view is
    return iter(view)
