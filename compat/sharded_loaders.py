"""Accelerate's dataloaders for one of several ranks, without an Accelerator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from ..common.optional import is_installed
from ..engine import GradientState, Loader, PartialState
from ..engine.data.skip_batches import SkippedLoader
from ..engine.nested import send_to_device
from .operations import synchronize_rng_states
from .shard_samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
)

_SETTINGS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)
_END = object()


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler that draws a dataloader's indices, or None if there is no batch sampler with a sampler."""
    holder = dataloader.sampler if isinstance(dataloader.sampler, BatchSampler) else dataloader.batch_sampler
    return getattr(holder, "sampler", None)


class _KindOfLoader(type):
    """Metaclass that counts a dataloader of `treadle.Accelerator` as an instance of the class of Accelerate's."""

    def __instancecheck__(cls, instance: Any) -> bool:
        loader = instance.loader if type(instance) is SkippedLoader else instance
        if not issubclass(type(loader), Loader):
            return super().__instancecheck__(instance)
        dispatches = loader.dispatch_batches
        if dispatches is None:
            dispatches = isinstance(getattr(loader, "dataset", None), IterableDataset)
        return issubclass(DataLoaderDispatcher if dispatches else DataLoaderShard, cls)


class DataLoaderStateMixin(metaclass=_KindOfLoader):
    """State of a dataloader that `GradientState` reports.

    Attributes:
        end_of_dataloader: Whether the current batch is the last one.
        remainder: Number of samples in the last global batch without repeated ones, 0 or the batch size for a complete
            batch, -1 if unknown. Not exact for an `IterableDatasetShard`.
    """

    end_of_dataloader = False
    remainder = -1
    gradient_state: Any

    def reset(self) -> None:
        """Reset the state of the last iteration."""
        self.end_of_dataloader, self.remainder = False, -1

    def begin(self) -> None:
        """Make this dataloader the active one of `GradientState`, and compute ``remainder``."""
        self.reset()
        loader: Any = self
        if not getattr(loader, "_drop_last", True):
            try:
                length = getattr(loader.dataset, "total_dataset_length", None)
                self.remainder = (len(loader.dataset) if length is None else length) % loader.total_batch_size
            except (TypeError, AttributeError, NotImplementedError):
                pass  # a stream has no length, and batches of a sampler without batch_size have no common size
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Remove this dataloader from `GradientState`."""
        self.gradient_state._remove_dataloader(self)


def _set_in_batch_sampler(holder: Any, sampler: Any) -> None:
    holder.sampler = sampler
    if hasattr(holder, "batch_sampler"):  # a batch sampler of Treadle's around the user's
        _set_in_batch_sampler(holder.batch_sampler, sampler)


def _set_sampler_epoch(sampler: Any, epoch: int) -> bool:
    """Set the epoch of a batch sampler and its inner samplers, and return whether any has ``set_epoch``."""
    found = False
    for holder in (sampler, getattr(sampler, "sampler", None)):
        if holder is not None and hasattr(holder, "set_epoch"):
            holder.set_epoch(epoch)
            found = True
    within = getattr(sampler, "batch_sampler", None)
    return (within is not None and _set_sampler_epoch(within, epoch)) or found


class DataLoaderShard(DataLoader[Any], DataLoaderStateMixin):
    """Dataloader that yields one rank's batches, moved to ``device`` unless it is None.

    Args:
        dataset, kwargs: Arguments of torch's ``DataLoader``.
        use_stateful_dataloader: Must be False.
        device: Device to which batches are moved. Default: None, which leaves them in place.
        rng_types: RNG states that all ranks copy from rank zero before each pass; see `synchronize_rng_states`.
        synchronized_generator: Generator to which ``"generator"`` in ``rng_types`` refers.
        skip_batches: Number of batches to skip in each pass. Default: 0.
        torch_device_mesh: Accepted and ignored.
        iteration: Number of the first epoch. Default: 0.
    """

    is_sharded = True  # which the Accelerator refuses to shard again

    def __init__(
        self,
        dataset: Any,
        device: Any = None,
        rng_types: Sequence[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        if use_stateful_dataloader:
            raise ValueError(
                "use_stateful_dataloader=True is not supported without an Accelerator. Prepare the DataLoader with "
                "treadle.Accelerator instead; its dataloaders have state_dict() in any case."
            )
        super().__init__(dataset, **kwargs)
        self.gradient_state = GradientState()
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.iteration = iteration

    def __iter__(self) -> Any:
        if self.rng_types is not None:
            synchronize_rng_states(list(self.rng_types), self.synchronized_generator)
        self.begin()
        self.set_epoch(self.iteration)
        batches = super().__iter__()
        batch, index = next(batches, _END), 0
        while batch is not _END:
            if self.device is not None:
                batch = send_to_device(batch, self.device, non_blocking=self._non_blocking)
            following = next(batches, _END)
            if following is _END:
                self.end_of_dataloader = True
            if index >= self.skip_batches:
                yield batch
            batch, index = following, index + 1
        self.iteration += index > 0
        self.end()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass and of the samplers, or of the dataset if no sampler has ``set_epoch``."""
        self.iteration = epoch
        if not _set_sampler_epoch(self.batch_sampler, epoch) and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def get_sampler(self) -> Any:
        """See the function `get_sampler`."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler that draws the indices."""
        holder = self.sampler if isinstance(self.sampler, BatchSampler) else self.batch_sampler
        _set_in_batch_sampler(holder, sampler)

    def skip_first_batches(self, num_batches: int) -> Any:
        """Return a dataloader like this one without its first batches, for `treadle.skip_first_batches`."""
        loader: Any = self
        settings = _copy_settings(loader)
        own = ("device", "rng_types", "synchronized_generator", "_drop_last", "_non_blocking", "iteration")
        settings |= {name: getattr(loader, name) for name in own}
        if isinstance(loader.dataset, IterableDataset):
            settings |= {"drop_last": loader.drop_last, "batch_size": loader.batch_size}
            settings["skip_batches"] = num_batches + loader.skip_batches
        elif isinstance(loader.sampler, BatchSampler):
            settings |= {"sampler": SkipBatchSampler(loader.sampler, num_batches), "batch_size": None}
        else:
            settings["batch_sampler"] = SkipBatchSampler(loader.batch_sampler, num_batches)
        return type(loader)(loader.dataset, **settings)

    @property
    def total_batch_size(self) -> int:
        """Global batch size; for an ``IterableDataset``, this rank's batch size."""
        batches: Any = self.sampler if isinstance(self.sampler, BatchSampler) else self.batch_sampler
        count = 1 if getattr(batches, "split_batches", False) else getattr(batches, "num_processes", 1)
        return int(batches.batch_size * count)

    @property
    def total_dataset_length(self) -> int:
        """Number of samples of all ranks; for an `IterableDatasetShard`, its length."""
        dataset: Any = self.dataset
        return dataset.total_length if hasattr(dataset, "total_length") else len(dataset)


class DataLoaderDispatcher(DataLoaderStateMixin):
    """Class of which a dataloader of `treadle.Accelerator` is an instance if Accelerate would dispatch its batches.

    It cannot be created, because every rank reads the data itself.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_dispatch()


def _refuse_dispatch() -> NoReturn:
    raise ValueError(
        "rank zero does not read batches for the other ranks, as it does in Accelerate with dispatch_batches=True, the "
        "default for a stream that is put on a device. Prepare the DataLoader with treadle.Accelerator or, if the "
        "stream is the same on all ranks, pass dispatch_batches=False to prepare_data_loader."
    )


def prepare_data_loader(
    dataloader: Any,
    device: Any = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Any = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> Any:
    """Return a dataloader of one rank's batches with Accelerate's semantics. No Accelerator is needed.

    By default, last batches are filled with samples from the beginning, as in Accelerate. A dataloader prepared by
    `treadle.Accelerator` does not repeat samples. To draw the same random order on all ranks, seed torch equally before
    this call, pass ``rng_types=["generator"]``, or set ``use_seedable_sampler`` and ``data_seed``.

    Args:
        dataloader: A ``DataLoader``.
        device: Device for ``put_on_device``. Default: None, which leaves batches in place.
        num_processes: Number of ranks that share the batches, unless a mesh is set. Default: the world size.
        process_index: Rank whose share is read. Default: the rank of this process.
        split_batches: Whether the dataloader's batch size is the global one. Default: False.
        put_on_device: Whether to move batches to ``device``.
        rng_types: RNG states that all ranks copy from rank zero before each pass; see `synchronize_rng_states`.
        dispatch_batches: Whether only rank zero reads the data, which is not supported with several ranks. Default:
            True for a stream that is put on a device, otherwise False.
        even_batches: Whether to fill the last batches of an indexed dataset from its beginning. Default: True.
        slice_fn_for_dispatch: Accepted and ignored.
        use_seedable_sampler: Whether to draw a random order with `SeedableRandomSampler`. Default: False.
        data_seed: Seed of the `SeedableRandomSampler`. Default: the seed of torch's generator.
        non_blocking: Whether to move batches without waiting for the copy. Default: False.
        use_stateful_dataloader: Must be False.
        torch_device_mesh: Mesh in which ranks that differ only along ``"tp"`` and ``"cp"`` read the same batches.

    Raises:
        ValueError: If an argument does not fit the dataloader, the number of ranks or the other arguments.
    """
    rank, count = _place(num_processes, process_index, torch_device_mesh)
    if dispatch_batches is None:
        dispatch_batches = put_on_device and isinstance(dataloader.dataset, IterableDataset)
    if dispatch_batches and count > 1:
        _refuse_dispatch()
    sampler = _choose_sampler(dataloader, use_seedable_sampler, data_seed)
    settings = _copy_settings(dataloader) | {"drop_last": dataloader.drop_last, "_drop_last": dataloader.drop_last}
    settings |= {"_non_blocking": non_blocking, "use_stateful_dataloader": use_stateful_dataloader}
    settings |= {"device": device if put_on_device else None, "rng_types": rng_types}
    order = None if use_seedable_sampler else sampler
    prepared = _make_shard(dataloader, count, rank, split_batches, even_batches, order, settings)
    if isinstance(sampler, SeedableRandomSampler) and use_seedable_sampler:
        prepared.set_sampler(sampler)
    return prepared


def _choose_sampler(dataloader: Any, use_seedable_sampler: bool, data_seed: int | None) -> Any:
    sampler = get_sampler(dataloader)
    if not isinstance(sampler, RandomSampler) or not use_seedable_sampler:
        return sampler
    return SeedableRandomSampler(
        sampler.data_source, sampler.replacement, sampler._num_samples, sampler.generator, data_seed=data_seed
    )


def _place(num_processes: int | None, process_index: int | None, mesh: Any) -> tuple[int, int]:
    """Return the rank's index among the ranks that share the batches, and their number."""
    state = PartialState()
    count = state.num_processes if num_processes is None else num_processes
    rank = state.process_index if process_index is None else process_index
    if not mesh:
        return rank, count

    def measure(*names: str) -> int:
        return math.prod(mesh[name].size() for name in names if name in mesh.mesh_dim_names)

    return rank // measure("tp", "cp"), measure("dp_replicate", "dp_shard")


def _make_shard(
    dataloader: Any,
    count: int,
    rank: int,
    split_batches: bool,
    even_batches: bool,
    order: Any,
    settings: dict[str, Any],
) -> Any:
    """Return the dataloader of one rank's share. ``order`` is the sampler that is the same on all ranks, or None."""
    dataset, batches, generator = dataloader.dataset, dataloader.batch_sampler, None
    by_sampler = isinstance(dataloader.sampler, BatchSampler)
    if isinstance(dataset, IterableDataset):
        batches = None
        if count != 1:
            dataset, generator = _shard_stream(dataloader, count, rank, split_batches)
    elif count != 1:
        generator = None if order is None else _seed_generator(order)
        source = dataloader.sampler if by_sampler else batches
        batches = BatchSamplerShard(source, count, rank, split_batches, even_batches)
    settings["rng_types"] = _select_rng_types(settings["rng_types"], generator)
    if batches is None:
        share = count if split_batches else 1
        settings["batch_size"] = None if dataloader.batch_size is None else dataloader.batch_size // share
    else:
        del settings["drop_last"]  # an argument of the batch sampler
    if by_sampler and batches is not None:
        settings |= {"sampler": batches if count != 1 else dataloader.sampler, "batch_size": None}
    else:
        settings["batch_sampler"] = batches
    return DataLoaderShard(dataset, synchronized_generator=generator, **settings)


def _select_rng_types(rng_types: Sequence[Any] | None, generator: torch.Generator | None) -> list[Any] | None:
    if rng_types is None or generator is not None:
        return None if rng_types is None else list(rng_types)
    return [kind for kind in rng_types if getattr(kind, "value", kind) != "generator"]


def _copy_settings(dataloader: Any) -> dict[str, Any]:
    return {name: getattr(dataloader, name) for name in _SETTINGS if hasattr(dataloader, name)}


def _shard_stream(dataloader: Any, count: int, rank: int, split_batches: bool) -> tuple[Any, torch.Generator | None]:
    dataset = dataloader.dataset
    if is_installed("datasets") and not split_batches:
        from datasets import IterableDataset as HubStream

        if isinstance(dataset, HubStream) and dataset.n_shards >= count:
            return dataset.shard(num_shards=count, index=rank), None
    shard = IterableDatasetShard(dataset, dataloader.batch_size, dataloader.drop_last, count, rank, split_batches)
    return shard, getattr(dataset, "generator", None)


def _seed_generator(sampler: Any) -> torch.Generator | None:
    """Return a sampler's generator, seeded from torch's if it is new, or None if the sampler cannot have one."""
    if not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None:
        sampler.generator = torch.Generator(torch.get_default_device())
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return sampler.generator  # type: ignore[no-any-return]
