"""Combination of several loaders into one: as the user builds it, and prepared."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from ...common.messages import format_count, name_type
from ...common.validation import choose
from ...strategies import World
from ..collectives import with_items
from ..nested import honor_type
from ..rng import Draw, RandomStream, isolated_random_state, random_state, seed_from, seed_generators
from .dataset_check import find_least, get_length
from .loader import INSIDE_GROUP, Loader
from .micro_batches import Cursor, GroupPlanner, Micro
from .sampler_rng import read_states

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")
_ENDED = object()


class CombinedLoader:
    """Combination of several dataloaders, which are read either together or one after the other.

    Except in mode ``"sequential"``, a combined batch has the structure of ``iterables``, with one batch per dataloader.

    Pass a `CombinedLoader` to ``fit`` or to `Accelerator.prepare`. In ``fit``, a plain dict, list or tuple of training
    dataloaders is combined in mode ``"max_size_cycle"``. Direct iteration yields
    ``(batch, batch_idx, dataloader_idx)``.

    A micro-batch is weighted by the total number of samples that all dataloaders contribute to it. If the loss is the
    mean over these samples, the gradient is therefore exact. A batch of unknown size counts as one sample.

    Args:
        iterables: Dataloaders or other iterables of batches, in dicts, lists and tuples that may be nested. A nested
            list or tuple that contains no ``DataLoader`` counts as a single iterable of batches.
        mode: ``"min_size"`` ends with the shortest dataloader. ``"max_size_cycle"`` ends with the longest and restarts
            the others. ``"max_size"`` ends with the longest and yields None for dataloaders that have ended.
            ``"sequential"`` reads one dataloader after the other. Default: ``"min_size"``.

    Raises:
        ValueError: If ``mode`` is unknown, or if ``iterables`` is empty.
        TypeError: If an entry of ``iterables`` is not iterable.

    Examples:
        >>> from treadle.engine import CombinedLoader
        >>> loader = CombinedLoader({"a": [1, 2, 3], "b": [4, 5]}, mode="max_size_cycle")
        >>> [batch for batch, batch_idx, dataloader_idx in loader]
        [{'a': 1, 'b': 4}, {'a': 2, 'b': 5}, {'a': 3, 'b': 4}]
    """

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        self.mode = choose("mode", mode, MODES)
        self.iterables = iterables
        self._limits: list[int | float] | None = None
        self._running: Iterator[Any] | None = None
        leaves = list(_iter_leaves(iterables, True))
        if not leaves:
            raise ValueError(f"CombinedLoader({iterables!r}) contains no dataloader. Pass at least one.")
        for leaf in leaves:
            if not isinstance(leaf, Iterable) and not hasattr(leaf, "__getitem__"):
                raise TypeError(
                    f"CombinedLoader got {leaf!r:.100} ({name_type(leaf)}), which is not a dataloader. Pass a "
                    "DataLoader or another iterable of batches."
                )
        self._flattened = leaves

    def _count_iterables(self) -> str:
        return format_count(len(self._flattened), "iterable")

    @property
    def flattened(self) -> list[Any]:
        """Flat list of the iterables, in order. It may be set to another list of the same length.

        Raises:
            ValueError: If it is set to a list of another length.
        """
        return self._flattened

    @flattened.setter
    def flattened(self, iterables: list[Any]) -> None:
        if len(iterables) != len(self._flattened):
            raise ValueError(
                f"CombinedLoader.flattened has length {len(iterables)}, but the CombinedLoader has "
                f"{self._count_iterables()}. Set one entry per iterable."
            )
        self.iterables = self.in_form(iterables)
        self._flattened = list(iterables)

    @property
    def limits(self) -> list[int | float] | None:
        """List with the maximum number of batches per pass for each iterable; None for no limits.

        If a single number is set, it applies to every iterable. Infinity means that an iterable has no limit.

        Raises:
            ValueError: If it is set to a list whose length is not the number of iterables.
        """
        return self._limits

    @limits.setter
    def limits(self, limits: int | float | list[int | float] | None) -> None:
        if isinstance(limits, int | float):
            limits = [limits] * len(self._flattened)
        if limits is not None and len(limits) != len(self._flattened):
            raise ValueError(
                f"CombinedLoader.limits has length {len(limits)}, but the CombinedLoader has "
                f"{self._count_iterables()}. Set one limit per iterable."
            )
        self._limits = limits

    @property
    def sampler(self) -> Any:
        """The sampler of each dataloader (None if it has none), in the structure of ``iterables``."""
        return self.in_form([getattr(loader, "sampler", None) for loader in self._flattened])

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler of each dataloader (None if it has none), in the structure of ``iterables``."""
        return self.in_form([getattr(loader, "batch_sampler", None) for loader in self._flattened])

    def in_form(self, values: Iterable[Any]) -> Any:
        """Return ``values``, one for each iterable, in the structure of ``iterables``.

        Args:
            values: One value per iterable, in the order of `flattened`.
        """
        return _fill_form(self.iterables, iter(values), True)

    def limit_of(self, number: int) -> int | None:
        """Return the maximum number of batches per pass over an iterable; None for no limit.

        Args:
            number: The index of the iterable.
        """
        limit = None if self._limits is None else self._limits[number]
        return None if limit is None or limit == float("inf") else int(limit)

    def __iter__(self) -> CombinedLoader:
        self._running = self._iter_numbered()
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self._running is None:
            iter(self)
        return next(self._running)  # type: ignore[arg-type]

    def _iter_numbered(self) -> Iterator[tuple[Any, int, int]]:
        def start(number: int, _: bool) -> Iterator[Any]:
            return itertools.islice(self._flattened[number], self.limit_of(number))

        last, index = 0, -1
        for batches, numbers in read_rows(self.mode, start, [0] * len(self._flattened)):
            sequential = self.mode == "sequential"
            number = numbers[0] if sequential else 0
            last, index = number, index + 1 if number == last else 0
            yield (batches[0] if sequential else self.in_form(batches)), index, number

    def __len__(self) -> int:
        lengths = [get_length(loader) for loader in self._flattened]
        limits = map(self.limit_of, range(len(lengths)))
        count = compute_joint_length(self.mode, [find_least(*pair) for pair in zip(lengths, limits, strict=True)])
        if count is None:
            raise TypeError(f"CombinedLoader(mode={self.mode!r}) has no length, because one of its iterables has none.")
        return count

    def reset(self) -> None:
        """Discard the iteration in progress and the iterator of each ``DataLoader``."""
        self._running = None
        for loader in self._flattened:
            if isinstance(loader, DataLoader):
                loader.__dict__["_iterator"] = None


def is_collection(value: Any) -> bool:
    """Return whether a value is a mapping, or a list or tuple that contains a dataloader.

    In a list, only a ``DataLoader``, a prepared loader or an iterator counts as one. Other items are batches.
    """
    return isinstance(value, Mapping) or (isinstance(value, list | tuple) and _holds_loaders(value))


def _holds_loaders(values: Iterable[Any]) -> bool:
    return any(
        isinstance(value, DataLoader | Loader | Iterator)
        or (isinstance(value, Mapping) and _holds_loaders(value.values()))
        or (isinstance(value, list | tuple) and _holds_loaders(value))
        for value in values
    )


def _iter_leaves(value: Any, outermost: bool = False) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    elif not (isinstance(value, list | tuple) and (outermost or _holds_loaders(value))):
        yield value
        return
    for child in value:
        yield from _iter_leaves(child)


def _fill_form(form: Any, values: Iterator[Any], outermost: bool = False) -> Any:
    if isinstance(form, Mapping):
        items = {key: _fill_form(child, values) for key, child in form.items()}
        return items if type(form) is dict else with_items(form, items)
    if isinstance(form, list | tuple) and (outermost or _holds_loaders(form)):
        return honor_type(form, [_fill_form(child, values) for child in form])
    return next(values)


def compute_joint_length(mode: str, lengths: list[int | None]) -> int | None:
    """Return the number of batches in an epoch of combined iterables; None if it cannot be determined.

    In mode ``"min_size"``, unknown lengths are ignored, so the result is an upper bound.
    """
    if mode == "min_size":
        return find_least(*lengths)
    defined_lengths = [length for length in lengths if length is not None]
    if len(defined_lengths) < len(lengths):
        return None
    return sum(defined_lengths) if mode == "sequential" else max(defined_lengths)


def read_rows(
    mode: str, start: Callable[[int, bool], Iterator[Any]], passes: list[int]
) -> Iterator[tuple[list[Any], list[int]]]:
    """Yield the batches of several iterables, combined in one of the modes of `CombinedLoader`.

    ``start(index, together)`` starts or resumes a pass over an iterable and returns its iterator. ``together`` is True
    if all iterables are started before the first batch is read. ``passes`` holds the number of completed passes over
    each iterable in this epoch, and is updated.

    Yields:
        A list with a batch of each iterable (None if the iterable has ended), and a list of the indices of the
        iterables that were read. In mode ``"sequential"``, each list has a single entry.
    """
    if mode == "sequential":
        for number in range(len(passes)):
            if not passes[number]:
                for batch in start(number, False):
                    yield [batch], [number]
                passes[number] += 1
        return
    cycled = mode == "max_size_cycle"

    def over() -> bool:
        return all(passes) if cycled or mode == "max_size" else any(passes)

    if over():  # this was known when a group was read whose last batch was not yet returned
        return
    iterators = [None if ended and not cycled else start(n, True) for n, ended in enumerate(passes)]
    while True:
        row = [_ENDED if iterator is None else next(iterator, _ENDED) for iterator in iterators]
        for number, batch in enumerate(row):
            if batch is _ENDED and iterators[number] is not None:
                passes[number] += 1
                iterators[number] = None
        if over() and (mode != "max_size" or all(batch is _ENDED for batch in row)):
            return
        for number in [n for n, batch in enumerate(row) if cycled and batch is _ENDED]:
            next_pass = iterators[number] = start(number, False)
            row[number] = next(next_pass, _ENDED)
            if row[number] is _ENDED:
                raise ValueError(
                    f"iterable {number} of the CombinedLoader yields no batches in pass {passes[number] + 1}, so "
                    f"mode={mode!r} can't repeat it. Pass an iterable that can be iterated over again, or use another "
                    "mode."
                )
        yield [None if b is _ENDED else b for b in row], [n for n, b in enumerate(row) if b is not _ENDED]


class JointBatches:
    """Reader that combines the batches of prepared loaders, and forms accumulation groups with exact weights.

    Attributes:
        passes: The number of passes that each loader has completed in the epoch.
        micros: Metadata of batches that were yielded and that the loop has not processed yet.
    """

    def __init__(self, loaders: list[Loader], source: CombinedLoader, planner: GroupPlanner) -> None:
        self.loaders = loaders
        self.mode = source.mode
        self.form = source.in_form
        self.planner = planner
        self.passes = [0] * len(loaders)
        self.micros: deque[tuple[Micro, Draw | None, None]] = deque()

    def length(self, limit: int | None) -> int | None:
        """Return the number of batches in an epoch, at most ``limit``; None if unknown.

        In mode ``"min_size"``, the result is an upper bound if the length of a loader is unknown.
        """
        return find_least(compute_joint_length(self.mode, [loader.length for loader in self.loaders]), limit)

    def behind(self) -> int:
        """Return the number of batches of this epoch that precede the current positions of the loaders."""
        firsts = [loader for loader, ended in zip(self.loaders, self.passes, strict=True) if not ended]
        lengths = [loader.length for loader in firsts]
        further = [None if n is None else n - loader.batches for n, loader in zip(lengths, firsts, strict=True)]
        total, remaining = self.length(None), compute_joint_length(self.mode, further) if further else 0
        if total is None or remaining is None:
            return max((loader.batches for loader in firsts), default=0)
        return total - remaining

    @property
    def full(self) -> int:
        """Number of samples in a full batch over all processes: the loaders' sum, or in sequential mode the maximum."""
        return (max if self.mode == "sequential" else sum)(loader.total_batch_size for loader in self.loaders)

    @property
    def left_out(self) -> Counter[str]:
        """Numbers of samples and of batches that ``drop_last`` drops per pass over the loaders."""
        return sum((loader.left_out for loader in self.loaders), Counter())

    def batches(self, remaining: int | None) -> Iterator[Any]:
        """Yield at most ``remaining`` micro-batches, and add their metadata to ``micros``.

        A group is read before its first batch is yielded, because its weights depend on the whole group.
        """
        self.micros.clear()
        read = self._read()
        for number in itertools.count():
            width = self.planner.accumulate(number)
            width = width if remaining is None else min(remaining, width)
            group = list(itertools.islice(read, width))
            if not group:
                return
            for micro, (batch, _) in zip(self.planner.plan([sizes for _, sizes in group]), group, strict=True):
                self.micros.append((micro, None, None))
                yield batch
            remaining = None if remaining is None else remaining - len(group)

    def _read(self) -> Iterator[tuple[Any, tuple[int, int]]]:
        """Yield batches, each with its numbers of samples on this process and on all processes."""
        alone = self.planner.size == 1

        def start(number: int, together: bool) -> Iterator[Any]:
            # A plain loop over zip() starts all of them before it reads a batch.
            return self.loaders[number].begun() if together else iter(self.loaders[number])

        for batches, numbers in read_rows(self.mode, start, self.passes):
            micros = [self.loaders[number].micro for number in numbers]
            samples = sum(micro.samples for micro in micros)
            everyone = samples if alone else sum(micro.everyone for micro in micros)
            yield (batches[0] if self.mode == "sequential" else self.form(batches)), (samples, everyone)


class JointLoader(Loader):
    """`CombinedLoader` prepared for this process. Each of its dataloaders is sharded and resumed separately.

    Dataloaders that draw random numbers only at the beginning of an epoch share one random stream, as in a loop over
    ``zip``. A dataloader that draws during the epoch has a separate stream.

    Attributes:
        loaders: The prepared dataloaders.

    Raises:
        TypeError: If the `CombinedLoader` contains a prepared dataloader.
        ValueError: If one of the dataloaders cannot be combined or prepared.

    Examples:
        >>> import treadle
        >>> from torch.utils.data import DataLoader
        >>> from treadle.engine import CombinedLoader
        >>> accelerator = treadle.Accelerator(cpu=True)
        >>> loader = accelerator.prepare(CombinedLoader([DataLoader(range(2)), DataLoader(range(4))]))
        >>> type(loader).__name__, len(loader), loader.mode
        ('JointLoader', 2, 'min_size')
    """

    _plan: JointBatches  # type: ignore[assignment]
    _reader: JointBatches  # type: ignore[assignment]

    def _prepare(self, source: Any, world: World, shard: bool, accumulate: Callable[[int], int], split: bool) -> None:
        if any(isinstance(dataloader, Loader) for dataloader in source.flattened):
            raise TypeError(
                "CombinedLoader contains a prepared dataloader. Combine the original DataLoaders, then prepare the "
                "CombinedLoader."
            )
        # As in evaluation, every process has a share of a last, short batch: a placeholder would be one part of a batch
        # whose other parts count.
        self.loaders = [
            Loader(
                dataloader,
                world=world,
                cursor=Cursor(),
                stream=self._stream,
                accumulate=lambda _: 1,
                shard=shard,
                evaluation=True,
                split=split,
            )
            for dataloader in source.flattened
        ]
        self._loader_streams: dict[int, RandomStream] = {}
        for number, loader in enumerate(self.loaders):
            loader.limit = source.limit_of(number)
            if loader._plan.draws_later:
                self._refuse_shared_generators(loader)
        planner = GroupPlanner(world.rank, world.size, accumulate)
        self._reader = self._plan = JointBatches(self.loaders, source, planner)
        self._reads = [generator for loader in self.loaders for generator in loader._reads]

    @property
    def mode(self) -> str:
        """Mode of the `CombinedLoader`, such as ``"min_size"``."""
        return self._plan.mode

    def _refuse_shared_generators(self, loader: Loader) -> None:
        mine = set(map(id, loader._plan.draws.private))
        for other in self.loaders:
            if other is not loader and mine & set(map(id, other._plan.draws.private)):
                raise ValueError(
                    f"two combined dataloaders share a generator, from which the {type(loader.source).__name__} draws "
                    "during the epoch, so neither can be resumed. Give each dataloader a separate generator."
                )

    def _begin(self) -> Iterator[Any]:
        self._leave_epoch()
        self._position.begin({})  # the loaders store the states that their orders are drawn from
        for number, loader in enumerate(self.loaders):
            if loader._plan.draws_later and number not in self._loader_streams:
                self._loader_streams[number] = _derive_stream(self._stream, number)
                loader.draw_from(self._loader_streams[number])
        length = self.length
        return self._pass_over(self._plan.batches(None if length is None else max(0, length - self.batches)))

    def end_epoch(self) -> None:
        """End the epoch, even if it was left early. A full iteration calls this method."""
        if self._position.order is not None:
            self._plan.passes = [0] * len(self.loaders)
            for loader in self.loaders:
                loader.end_epoch()
        super().end_epoch()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch number for the next iteration over the dataloader.

        The number is also set for each combined dataloader.

        Args:
            epoch: The number of the epoch, from 0.
        """
        super().set_epoch(epoch)
        for loader in self.loaders:
            loader.set_epoch(epoch)

    def keep_order(self) -> bool:
        """Use the same order in every epoch; see `Loader.keep_order`."""
        shuffled = [loader.keep_order() for loader in self.loaders]
        return any(shuffled)

    def close(self) -> None:
        """Shut down all workers of the combined dataloaders; see `Loader.close`."""
        for loader in self.loaders:
            loader.close()

    def decide_sharding(self, world: World) -> None:
        """Determine for each combined dataloader whether the ranks share its data; see `Loader.decide_sharding`.

        Args:
            world: The ranks that iterate over the dataloaders.
        """
        for loader in self.loaders:
            loader.decide_sharding(world)

    def state_dict(self) -> dict[str, Any]:
        """Return a state with each dataloader's position and the number of passes completed over it in this epoch.

        Raises:
            ValueError: If it is called inside a group of micro-batches, because accumulated gradients are not saved.
        """
        if self._last is not None and not self._last[0].last:
            raise ValueError(INSIDE_GROUP)
        return {
            "mode": self._plan.mode,
            "epoch": self.epoch,
            "samples": self._position.samples,
            "batches": self.batches,
            "running": self._position.order is not None,
            "passes": list(self._plan.passes),
            "loaders": [loader.state_dict() for loader in self.loaders],
            "streams": {str(number): stream.get_state() for number, stream in self._loader_streams.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state returned by `state_dict`. The world size may have changed.

        Args:
            state: A state returned by `state_dict`.

        Raises:
            ValueError: If this is a training dataloader and the state does not fit it.
        """
        if self.evaluation and self.describe_difference(state):
            self.set_epoch(state["epoch"])
            return
        self.check(state)
        plan = self._plan
        widths = [saved["width"] for saved in state["loaders"]]
        for loader, saved in zip(self.loaders, state["loaders"], strict=True):
            loader.load_state_dict(saved)
            if not self.evaluation:  # the combined loaders themselves count as those of an evaluation
                loader.compare_epoch(saved)
        self._loader_streams = {int(number): RandomStream(stream) for number, stream in state["streams"].items()}
        for number, stream in self._loader_streams.items():
            self.loaders[number].draw_from(stream)
        # The orders are part of the loaders' states, so an empty one only marks an epoch that has begun.
        self._position.load_state_dict({**state, "order": {} if state["running"] else None, "started": False})
        plan.passes = list(state["passes"])
        if widths != [loader._plan.full for loader in self.loaders]:
            self._position.batches = plan.behind()  # with another number of processes, each has fewer or more batches
        self._last = None

    def reading_state(self) -> dict[str, Any]:
        """Return the state of this rank alone; see `Loader.reading_state`."""
        return {**super().reading_state(), "loaders": [loader.reading_state() for loader in self.loaders]}

    def load_reading_state(self, state: dict[str, Any]) -> None:
        """Restore the state of this rank; see `Loader.load_reading_state`.

        Args:
            state: A state returned by `reading_state`.
        """
        super().load_reading_state(state)
        for loader, loader_state in zip(self.loaders, state["loaders"], strict=False):
            restored = read_states(loader._reads)
            loader.load_reading_state({**loader_state, "generators": restored})

    def describe_difference(self, state: dict[str, Any]) -> str:
        """Return a description of the first mismatch between a saved state and the dataloaders; empty if none."""
        count, mode = len(self.loaders), self._plan.mode
        saved_count = len(state["loaders"]) if "loaders" in state else 1
        if saved_count != count or "loaders" not in state:
            saved_loaders = format_count(saved_count, "training dataloader")
            return f"the checkpoint was saved with {saved_loaders}, but this run combines {count}"
        if state["mode"] != mode:
            return (
                f"the checkpoint was saved with CombinedLoader(mode={state['mode']!r}), but this run uses mode={mode!r}"
            )
        pairs = zip(self.loaders, state["loaders"], strict=True)
        return next(filter(None, (loader.describe_difference(saved) for loader, saved in pairs)), "")


def _derive_stream(stream: RandomStream, number: int) -> RandomStream:
    # Each loader that draws during the epoch has a stream whose state is saved by itself. In a common stream, the draws
    # of loaders that are read in turn would be mixed.
    with isolated_random_state():
        seed_generators(seed_from(stream.get_state(), f"loader {number}") % 2**32)
        return RandomStream(random_state())
