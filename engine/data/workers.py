"""Seeds of samples in worker processes, iteration without workers, and the lifetime of workers."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info

TORCH_SEEDED = -1
"""Value that marks an epoch whose workers have just been started and seeded by torch."""


class _StandIn:
    """Base class of datasets that wrap another dataset and forward attribute access and ``len`` to it."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A worker_init_fn that opens a file stores it on `get_worker_info().dataset`.
        setattr(self.dataset, name, value)


class SeededStream(_StandIn, IterableDataset[Any]):
    """Stream whose persistent workers draw the same random numbers in an epoch as the new workers of a resumed run."""

    def __init__(self, dataset: Any) -> None:
        self.__dict__["dataset"] = dataset
        self.__dict__["_epoch_seed"] = torch.full((1,), TORCH_SEEDED, device="cpu").share_memory_()

    def __iter__(self) -> Iterator[Any]:
        seed = int(self.__dict__["_epoch_seed"])
        if seed != TORCH_SEEDED:
            info = get_worker_info()
            _seed((seed + (0 if info is None else info.id)) % 2**63)
        return iter(self.dataset)


def seed_epoch(stream: SeededStream, seed: int) -> None:
    """Set the workers' seed for the next epoch; `TORCH_SEEDED` keeps the seed that torch has set.

    This is a function, because a method would hide an attribute of the dataset with the same name.
    """
    stream.__dict__["_epoch_seed"][0] = seed


class SeededSamples(_StandIn):
    """Dataset that seeds the generators of Python, NumPy and torch before each sample is read in a worker.

    The seed depends on the state of the run's random stream when the epoch's order is drawn, on the epoch and on the
    sample's position in it, so a resumed run draws the same augmentations. A dataset with ``__getitems__`` is seeded
    once per batch.
    """

    def __init__(self, dataset: Any) -> None:
        self.__dict__["dataset"] = dataset
        if _reads_in_bulk(dataset):
            self.__dict__["__getitems__"] = self._get_items

    def __getitem__(self, item: tuple[int, int, Any]) -> Any:
        self._seed(item)
        return self.dataset[item[2]]

    def _get_items(self, items: list[tuple[int, int, Any]]) -> Any:
        self._seed(items[0])  # they are read together, so they can only be seeded together
        return self.dataset.__getitems__([index for _, _, index in items])

    @staticmethod
    def _seed(item: tuple[int, int, Any]) -> None:
        # An odd multiplier spreads neighbouring positions over the 63 bits (Knuth, TAOCP 3.3.4: MMIX's constant).
        _seed((item[0] + item[1] * 6364136223846793005) % 2**63)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def _reads_in_bulk(dataset: Any) -> bool:
    # A Subset only passes `__getitems__` on, and reads one by one if its dataset has none.
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def iterate_in_process(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return an iterator over the batches of a ``DataLoader`` without workers.

    It omits the profiler marks that torch's iterator records for each batch, which take time in each step.
    """
    # The seed for workers that do not exist: torch draws it in any case, so it is drawn here too; otherwise the order
    # would differ.
    torch.empty((), dtype=torch.int64, device="cpu").random_(generator=loader.generator)
    return _generate_batches(loader)


def _generate_batches(loader: DataLoader[Any]) -> Iterator[Any]:
    dataset, collate = loader.dataset, loader.collate_fn
    if loader.batch_sampler is None:
        for index in loader.sampler:
            yield collate(dataset[index])
        return
    in_bulk = getattr(dataset, "__getitems__", None)
    for indices in loader.batch_sampler:
        yield collate(in_bulk(indices) if in_bulk else [dataset[index] for index in indices])


class LiveWithRank:
    """``worker_init_fn`` that makes a worker end when its parent process ends, and then calls the user's own ``init``.

    A rank that receives SIGTERM needs its workers to complete the step and save a checkpoint, but torch's workers end
    on SIGTERM. On POSIX systems, each worker therefore moves to a process group of its own (``os.setpgid``), which a
    signal to the rank's group does not reach.

    A thread in the worker waits for the rank's process to end, because torch checks the parent process only every 5 s.
    """

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self._init = init

    def __call__(self, worker_id: int) -> None:
        """Prepare the worker process, in which torch calls this function."""
        if hasattr(os, "setpgid"):
            os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        rank = multiprocessing.parent_process()
        if rank is not None:
            threading.Thread(target=_end_with, args=(rank.sentinel,), name="treadle parent", daemon=True).start()
        if self._init is not None:
            self._init(worker_id)


def _end_with(sentinel: Any) -> None:
    multiprocessing.connection.wait([sentinel])
    # torch's worker may be blocked on a queue that is no longer read, so it cannot be asked to end.
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


def note_workers(view: DataLoader[Any], iterator: Any) -> Any:
    """Store a weak reference to an iterator that has workers, for `end_workers`; return the iterator."""
    if hasattr(iterator, "_shutdown_workers"):
        view.__dict__["_treadle_iterator"] = weakref.ref(iterator)
    return iterator


def end_workers(view: DataLoader[Any]) -> None:
    """End the workers of the loader's latest iterator, even if other references to it exist."""
    iterator = view.__dict__.pop("_treadle_iterator", lambda: None)()
    if iterator is not None:
        iterator._shutdown_workers()  # private, like the call in its `__del__`; present in torch 2.6 to 2.13
