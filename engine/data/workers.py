"""Seeds of samples in worker processes, iteration without workers, and the lifetime of workers."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    StackDataset,
    Subset,
    get_worker_info,
)

from ...common.messages import warn

TORCH_SEEDED = -1
"""Value that marks an epoch whose workers have just been started and seeded by torch."""


class _WrappedDataset:
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


class SeededStream(_WrappedDataset, IterableDataset[Any]):
    """Stream whose persistent workers draw the same random numbers in an epoch as the new workers of a resumed run.

    The workers also receive the epoch number, which ``set_epoch`` sets in the parent process only.
    """

    def __init__(self, dataset: Any) -> None:
        self.__dict__["dataset"] = dataset
        self.__dict__["_epoch_seed"] = torch.tensor([TORCH_SEEDED, 0], device="cpu").share_memory_()
        self.__dict__["_known_epoch"] = KnownEpoch()

    def __iter__(self) -> Iterator[Any]:
        seed, epoch = self.__dict__["_epoch_seed"].tolist()
        if seed != TORCH_SEEDED:
            info = get_worker_info()
            for generator in _list_generators():
                generator.seed((seed + (0 if info is None else info.id)) % 2**63)
        self.__dict__["_known_epoch"].enter(self.dataset, epoch)
        return iter(self.dataset)


def begin_epoch(stream: SeededStream, seed: int, epoch: int) -> None:
    """Set the workers' seed and the number of the next epoch; `TORCH_SEEDED` keeps the seed that torch has set.

    This is a function, because a method would hide an attribute of the dataset with the same name.
    """
    stream.__dict__["_epoch_seed"].copy_(torch.tensor([seed, epoch], device="cpu"))


class KnownEpoch:
    """Epoch number that this process's copy of a dataset has received.

    Attributes:
        epoch: The number; in the parent process, the one with which new workers start.
    """

    def __init__(self) -> None:
        self.epoch = 0

    def enter(self, dataset: Any, epoch: int) -> None:
        """Call ``set_epoch`` of a dataset in a persistent worker when an epoch begins."""
        if epoch != self.epoch:
            self.epoch = epoch
            for owner in iter_epoch_owners(dataset):
                owner.set_epoch(epoch)


def iter_epoch_owners(dataset: Any, nested: bool = True) -> Iterator[Any]:
    """Yield a dataset if it has ``set_epoch``; otherwise, with ``nested``, those in a container of torch that do."""
    if callable(getattr(dataset, "set_epoch", None)):
        yield dataset
    elif nested and isinstance(dataset, Subset):
        yield from iter_epoch_owners(dataset.dataset)
    elif nested and isinstance(dataset, ConcatDataset | ChainDataset | StackDataset):
        within = dataset.datasets
        for inner in within.values() if isinstance(within, dict) else within:
            yield from iter_epoch_owners(inner)


class _TwinnedGenerator:
    """Global generator of Python or NumPy, and a twin whose state is the same unless someone else draws.

    ``random.getstate`` takes 14 µs, a draw from each of the two 0.1 µs. ``modulus`` limits the seeds.
    """

    def __init__(self, generator: Any, twin: Any, modulus: int) -> None:
        self._generator, self._twin, self._modulus = generator, twin, modulus

    def seed(self, seed: int) -> None:
        self._generator.seed(seed % self._modulus)

    def seed_for_check(self, seed: int) -> None:
        self.seed(seed)
        self._twin.seed(seed % self._modulus)

    def has_moved(self) -> bool:
        return bool(self._generator.random() != self._twin.random())


class _TorchGenerator:
    """Default CPU generator of torch, and its state after it was seeded; see `_TwinnedGenerator`."""

    seed = torch.default_generator.manual_seed

    def seed_for_check(self, seed: int) -> None:
        self.seed(seed)
        self._state = torch.default_generator.get_state()

    def has_moved(self) -> bool:
        return not torch.equal(torch.default_generator.get_state(), self._state)


_TORCH = _TorchGenerator()


@cache
def _list_generators() -> tuple[Any, ...]:  # when first used: to import NumPy's takes time
    python = _TwinnedGenerator(random, random.Random(), 2**63)
    return python, _TwinnedGenerator(np.random, np.random.RandomState(), 2**32), _TORCH


Item = tuple[tuple[int, int], int, Any]
"""The seed and the number of an epoch, the position of a sample in it, and the index of the sample."""


class SeededReader:
    """Reader that seeds each sample for the generators that the dataset draws from, in a worker or for a `FixedTree`.

    To seed all three takes 10 µs, more than to read a row of a tensor. The first batch is therefore seeded for all, and
    shows which of them the dataset and the collate function use. Those that they do not use are only watched; a batch
    in which one of them was used nevertheless is read again. Torch's generator is still seeded once per batch, because
    ``torch.initial_seed`` shows its seed without a draw.
    """

    def __init__(self, dataset: Any, batched: bool) -> None:
        self.dataset = dataset
        self.batched = batched
        self.known_epoch = KnownEpoch()
        self._bulk = batched and _reads_in_bulk(dataset)
        self._used: list[Any] = []
        self._watched: list[Any] | None = None  # None before the first batch

    def read(self, items: list[Item]) -> Any:
        """Return the samples of a batch for `collate`."""
        if items:
            self.known_epoch.enter(self.dataset, items[0][0][1])
        first = self._watched is None
        if first:
            self._watched = list(_list_generators())
        elif items and get_worker_info() is None:  # the loop has used the generators since the last batch
            for generator in self._watched:  # type: ignore[union-attr]
                generator.seed_for_check(_compute_seed(items[0]))
        elif items and _TORCH in self._watched:  # type: ignore[operator]
            _TORCH.seed_for_check(_compute_seed(items[0]))
        return SeededBatch(self._read(items, first), items, first, self)

    def read_alone(self, item: Item) -> Any:
        """Return a sample that is seeded for all generators."""
        self.known_epoch.enter(self.dataset, item[0][1])
        for generator in _list_generators():
            generator.seed(_compute_seed(item))
        return self.dataset[item[2]]

    def collate(self, batch: SeededBatch, collate: Callable[[Any], Any]) -> Any:
        """Return the collated batch; read it again if it used a generator that it was not seeded for."""
        collated = collate(batch.samples)
        while self._note_used() and not batch.is_first:
            collated = collate(self._read(batch.items, False))
        return collated

    def _read(self, items: list[Item], first: bool) -> Any:
        if self._bulk:  # the samples are read together, so they can only be seeded together
            self._seed(items[:1], first)
            return self.dataset.__getitems__([index for _, _, index in items])
        dataset, samples = self.dataset, []
        if not (self._used or first):
            samples = [dataset[index] for _, _, index in items]
        else:
            for number, item in enumerate(items):
                if first and number:
                    self._note_used()
                self._seed((item,), first)
                samples.append(dataset[item[2]])
        return samples if self.batched else samples[0]

    def _seed(self, items: Iterable[Item], first: bool) -> None:
        for item in items:
            seed = _compute_seed(item)
            for generator in self._used:
                generator.seed(seed)
            for generator in self._watched if first else ():  # type: ignore[union-attr]
                generator.seed_for_check(seed)

    def _note_used(self) -> bool:
        assert self._watched is not None
        moved = [generator for generator in self._watched if generator.has_moved()]
        if moved:
            self._used += moved
            self._watched = [generator for generator in self._watched if generator not in moved]
        return bool(moved)


@dataclass(slots=True)
class SeededBatch:
    """Samples of a batch that is to be collated.

    Attributes:
        samples: The samples; a single one without automatic batching.
        items: The items that they were read from.
        is_first: Whether they were seeded for all generators.
        reader: The reader of the samples.
    """

    samples: Any
    items: list[Item]
    is_first: bool
    reader: SeededReader


class SeededSamples(_WrappedDataset):
    """Dataset that seeds the generators of Python, NumPy and torch before each sample is read in a worker.

    The seed depends on the state of the run's random stream when the epoch's order is drawn, on the epoch and on the
    sample's position in it, so a resumed run draws the same augmentations. A dataset with ``__getitems__`` is seeded
    once per batch. The workers also receive the epoch number, which ``set_epoch`` sets in the parent process only.
    """

    def __init__(self, dataset: Any, batched: bool) -> None:
        self.__dict__["dataset"] = dataset
        self.__dict__["_seeded_reader"] = reader = SeededReader(dataset, batched)
        if batched:
            self.__dict__["__getitems__"] = reader.read

    def __getitem__(self, item: Item) -> Any:
        reader = self.__dict__["_seeded_reader"]
        # A subclass of DataLoader that reads the samples of a batch itself may collate several at once.
        return reader.read_alone(item) if reader.batched else reader.read([item])


def known_epoch(samples: SeededSamples) -> KnownEpoch:
    """Return the epoch number with which new workers start; a function for the same reason as `begin_epoch`."""
    return samples.__dict__["_seeded_reader"].known_epoch  # type: ignore[no-any-return]


class SeededCollate:
    """Wrapper of the user's collate function for batches of a `SeededReader`."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, batch: Any) -> Any:
        """Return the collated batch."""
        return batch.reader.collate(batch, self.collate) if type(batch) is SeededBatch else self.collate(batch)


def _compute_seed(item: Item) -> int:
    # An odd multiplier spreads neighbouring positions over the 63 bits (Knuth, TAOCP 3.3.4: MMIX's constant).
    return (item[0][0] + item[1] * 6364136223846793005) % 2**63


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
    # would differ. And on the default device, as torch does, which is where the loader's generator has to be.
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
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
    Meanwhile it measures the worker's memory.

    Attributes:
        memory: The memory of all workers of the loader.
    """

    def __init__(self, init: Callable[[int], Any] | None, workers: int) -> None:
        self._init = init
        self.memory = WorkerMemory(workers)

    def __call__(self, worker_id: int) -> None:
        """Prepare the worker process, in which torch calls this function."""
        if hasattr(os, "setpgid"):
            os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A full collection writes to each object that is older than the fork, and so copies the pages of all modules:
        # 79 MiB per worker after `import torch, transformers`.
        gc.freeze()
        rank = multiprocessing.parent_process()
        if rank is not None:
            arguments = (rank.sentinel, self.memory, worker_id)
            threading.Thread(target=_end_with, args=arguments, name="treadle parent", daemon=True).start()
        if self._init is not None:
            self._init(worker_id)


def _end_with(sentinel: Any, memory: WorkerMemory, worker_id: int) -> None:
    pause = 0.25
    first = read_memory()
    while not multiprocessing.connection.wait([sentinel], None if first is None else pause):
        now = read_memory()
        if first is not None and now is not None:
            memory.record(worker_id, now.own, first.shared - now.shared)
        pause = min(2 * pause, 30.0)
    # torch's worker may be blocked on a queue that is no longer read, so it cannot be asked to end.
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


COPIES_TOLD_FROM = 2**29
"""Bytes that the workers of a loader copy before it is reported: less does not fill a machine."""


class Memory(NamedTuple):
    """Resident memory of a process in bytes: pages of its ``own``, and pages that are ``shared`` with others."""

    own: int
    shared: int


def read_memory() -> Memory | None:
    """Return this process's memory; None where the system does not tell which pages are shared (Linux does).

    It takes 10 ms at 500 MiB, because the kernel visits each page.
    """
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            sizes = {
                name: int(size.split()[0]) * 1024 for name, size in (line.split(":", 1) for line in list(file)[1:])
            }
    except OSError:
        return None
    return Memory(sizes["Private_Clean"] + sizes["Private_Dirty"], sizes["Shared_Clean"] + sizes["Shared_Dirty"])


class WorkerMemory:
    """Memory that the workers of a loader have copied since they were forked.

    A forked worker shares its parent's pages until one of the two writes to them, and reading a Python object also
    writes its reference count. A dataset of many lists, dicts or strings is therefore copied by each worker, page by
    page, while the worker reads its samples. Source: https://github.com/pytorch/pytorch/issues/13246
    """

    def __init__(self, workers: int) -> None:
        # One row per worker: the pages of its own, and those of its first ones that it no longer shares.
        self._rows = torch.zeros(workers, 2, dtype=torch.int64, device="cpu").share_memory_()
        self._bound = COPIES_TOLD_FROM

    def record(self, worker_id: int, own: int, copied: int) -> None:
        """Write a worker's memory in bytes; the worker calls it."""
        self._rows[worker_id, 0], self._rows[worker_id, 1] = own, copied

    def warn_of_copies(self, epoch: int) -> None:
        """Warn if the workers have copied 512 MiB together, and again when that has doubled.

        A single worker is left out: the page that its parent writes to, such as a weight on the CPU, becomes its own.
        """
        own, copied = self._rows.sum(0).tolist()
        count = len(self._rows)
        if count == 1 or copied < self._bound:
            return
        self._bound = 2 * copied
        warn(
            f"in epoch {epoch}, the {count} data workers have copied {copied / 2**30:.1f} GiB of the memory that they "
            f"shared with their parent process, and hold {own / count / 2**30:.2f} GiB each of their own. To read a "
            "Python object is to write its reference count, which copies its page: each worker copies a dataset of "
            "many lists, dicts or strings. Keep the samples in NumPy arrays, tensors or Arrow tables instead."
        )


def note_workers(view: DataLoader[Any], iterator: Any) -> Any:
    """Store a weak reference to an iterator that has workers, for `end_workers`; return the iterator."""
    if hasattr(iterator, "_shutdown_workers"):
        view.__dict__["_treadle_iterator"] = weakref.ref(iterator)
    return iterator


def end_workers(view: DataLoader[Any]) -> None:
    """End the workers of the loader's latest iterator, even if other references to it exist."""
    iterator = view.__dict__.pop("_treadle_iterator", lambda: None)()
    if iterator is not None:
        iterator._shutdown_workers()  # private, like the call in its `__del__`; present in torch 2.11 to 2.13
