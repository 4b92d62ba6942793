"""Sharding of a loader by indices: the user's sampler is replayed, and each process keeps its share."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ...strategies import World
from ..rng import Draw, RandomStream, are_equal, host_state, seed_at, seed_from, set_host_state
from .dataset_check import digest, get_length, share_data, warn_order_changed
from .epoch_position import EpochPosition
from .micro_batches import GroupPlanner, Micro, avoid_rewind, share, split_size
from .rank_shares import RankShares, Share, compare_across_ranks
from .sampler_rng import CopiedStream, Draws, preserve_loader_state
from .seedable_sampler import SeedableRandomSampler
from .workers import iter_epoch_owners

# These draw only when an epoch begins, so they need no random stream later.
_DRAW_ONCE = (SequentialSampler, RandomSampler, SeedableRandomSampler, SubsetRandomSampler, WeightedRandomSampler)

_COMPARED = 64  # number of indices that are compared between ranks, and between a checkpoint and a run


class GroupIndices(NamedTuple):
    """Sample indices of the micro-batches of one accumulation group.

    Attributes:
        global_batches: For each micro-batch, the indices that are divided among the ranks, and the sizes of the ranks'
            batches (None for even shares).
        slices: This process's share of each global batch.
        seeds: In a `FixedTree`, the seed of the random numbers that each micro-batch draws.
    """

    global_batches: list[tuple[list[Any], list[int] | None]]
    slices: list[slice]
    seeds: tuple[int, ...] = ()

    def get_indices(self, number: int) -> list[Any]:
        """Return this process's indices in a micro-batch; an empty list if its share is empty."""
        return self.global_batches[number][0][self.slices[number]]


class ShardedBatches:
    """Batch sampler that replays the user's own sampler and keeps this process's share of each global batch.

    A global batch consists of ``batch_size`` indices of the user's sampler per process, or of one batch of a custom
    batch sampler per process. If a custom batch sampler has a method ``split_batch(batch, parts)``, each of its batches
    is a global batch, which this method splits over the processes. A process whose share is empty yields one sample
    with weight zero.

    ``merge_tail`` adds a last global batch with fewer samples than processes to the batch before it. ``positions``
    yields ``((epoch seed, dataset_epoch), position, index)`` instead of indices, so that workers can seed each sample
    and call ``set_epoch``.

    Attributes:
        position: The position of the dataloader, which the loop advances.
        start: The position of the first batch that the current iteration yields.
        micros: For each batch that the loop has not processed yet: its metadata, the draws made for its group (or
            None), and the indices of the group.
        dataset_epoch: The number that ``set_epoch`` of the dataset receives for the next epoch.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        planner: GroupPlanner,
        stream: RandomStream,
        position: EpochPosition,
        merge_tail: bool,
        positions: bool,
    ) -> None:
        batches = loader.batch_sampler
        self.plain = type(batches) is BatchSampler
        self.batched = batches is not None
        unit: Any = batches if self.batched else loader.sampler
        self.sampler: Iterable[Any] = unit.sampler if self.plain else unit
        self.batch_size = int(getattr(batches, "batch_size", None) or 1) if self.plain else 1
        self._split_batch: Callable[[Any, int], list[Any]] | None = getattr(batches, "split_batch", None)
        self.drop_last = bool(getattr(batches, "drop_last", False))
        self._loader = loader
        self.dataset = loader.dataset
        count, length = getattr(batches, "num_samples", None), get_length(self.dataset)
        if self._split_batch is not None and count is not None and length is not None and count != length:
            raise ValueError(
                f"{type(batches).__name__} has the lengths of {count} samples, but the dataset has {length}. Pass one "
                "length per sample of the DataLoader's dataset."
            )
        self.planner = planner
        self.merge_tail = merge_tail and self.batched
        self.positions = positions
        self.draws = Draws(stream, loader, (batches, self.sampler))
        self.draws_at_once = type(self.sampler) in _DRAW_ONCE
        self._counting_draws = not self.draws_at_once  # until the first count shows otherwise
        self.dataset_epoch = 0
        self._expected: tuple[int, str] | None = None  # until the loaded epoch is started
        self._first_indices: list[Any] = []  # of the running epoch, at least `_COMPARED` once they were drawn
        self.position = position
        self._undo: dict[str, Any] | None = None
        self._copy: CopiedStream | None = None  # None if the sampler draws only when the epoch begins
        self.begin(None)

    def begin(self, limit: int | None, start: EpochPosition | None = None) -> None:
        """Set up an iteration over at most ``limit`` batches from ``start``; None for the current position."""
        # A copy, because the sampler is read later, and with workers ahead of the loop.
        self.start, self.limit = replace(start or self.position), limit
        self.position.batches += self.start.passing
        self.position.passing = 0
        self.micros: deque[tuple[Micro, Draw | None, GroupIndices]] = deque()

    def iterate(self, view: Iterable[Any], limit: int | None) -> Iterator[Any]:
        """Return an iterator over at most ``limit`` batches of ``view``, whose batch sampler this is."""
        self.begin(limit)
        return self._pass_over(iter(view)) if self.start.passing else iter(view)

    def _pass_over(self, batches: Iterator[Any]) -> Iterator[Any]:
        first = list(itertools.islice(batches, 1))  # before it, the sampler is read up to the position
        if not first and (drawn := self._take_drawn()) is not None:
            self.draws.stream.follow(drawn)
        yield from itertools.chain(first, batches)

    def split(self) -> None:
        """Interpret ``batch_size`` as the size of the global batch, and divide it by the number of processes.

        Raises:
            ValueError: If the loader's batches cannot be divided.
        """
        known = self.batch_size if self.plain else None
        self.batch_size = split_size(known, self.planner.size, "a custom batch sampler")

    @property
    def draws_later(self) -> bool:
        """True if the sampler may draw during the epoch rather than entirely at its beginning."""
        return not self.draws_at_once

    def unshuffle(self) -> bool:
        """Replace a ``RandomSampler`` with the dataset's order, and a ``SubsetRandomSampler`` with that of its indices.

        Returns:
            True if the loader shuffled before this call. A custom sampler is assumed to shuffle, unless it has a false
            ``shuffle`` attribute.
        """
        sampler = self.sampler
        draw = getattr(type(sampler), "__iter__", None)  # a subclass may select the samples itself
        if isinstance(sampler, RandomSampler) and draw in (RandomSampler.__iter__, SeedableRandomSampler.__iter__):
            self.sampler = SequentialSampler(sampler.data_source)
        elif isinstance(sampler, SubsetRandomSampler) and draw is SubsetRandomSampler.__iter__:
            self.sampler = list(sampler.indices)
        else:
            return type(sampler) is not SequentialSampler and bool(getattr(sampler, "shuffle", True))
        self.draws_at_once = True
        return True

    def open(self, get_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Start the loader's iterator, which draws the seed of its workers from the run's random stream.

        The draw is undone if the order is drawn again, or if persistent workers have a seed already.
        """
        position = self.position
        self._undo = self.draws.state() if position.started or position.order is not None else None
        position.started = self._loader.persistent_workers
        with self.draws.stream.drawing():
            iterator = get_iterator()
            self._rewind()  # other loaders may draw before the first batch is requested
        return iterator

    def _rewind(self) -> None:
        if self._undo is not None:
            self.draws.rewind(self._undo)
            self._undo = None

    def __iter__(self) -> Iterator[Any]:
        # A generator, because nothing may be drawn before the loader has drawn its workers' seed, as in a plain loop.
        yield from self._open()

    def total(self, limit: int | None) -> int:
        """Return the number of batches that this process yields in a whole epoch, at most ``limit``.

        Raises:
            TypeError: If the user's sampler has no length.
        """
        shares = self.planner.shares
        if shares is not None and shares.batches is not None:
            return shares.batches if limit is None else min(shares.batches, limit)
        return self._count_batches(self._count_items(len), limit)

    def decide_sharding(self, world: World) -> None:
        """Determine whether all ranks read one dataset in one order, or each reads its own. Call it on all ranks.

        Raises:
            ValueError: On every rank, if neither is the case.
        """
        if self.planner.shares is None and not share_data(self.dataset, world):
            self.planner.disable_sharding()
        if self.planner.shares is None:
            self.draws.copy_rank_zero(world)
            if not self._has_common_order(world):
                self.planner.disable_sharding()
        if self.planner.shares is not None:
            self.planner.shares.exchange_lengths(self.share(), world, type(self.dataset).__name__)

    def _has_common_order(self, world: World) -> bool:
        if type(self.sampler).__module__ == Sampler.__module__:  # torch's own samplers do not depend on the rank
            return True
        state = self.draws.stream.get_state()
        with self.draws.stream.drawing(), preserve_loader_state(self._loader):
            first = list(itertools.islice(avoid_rewind(iter(self.sampler)), _COMPARED))
        self.draws.stream.go_to(state)
        return compare_across_ranks(digest(first), type(self.sampler).__name__, "indices", world)

    def share(self) -> Share:
        """Return the length of this rank's own data."""
        count = self._count_items(get_length)
        if count is None:
            return Share(None, self.batch_size, None)
        samples = count - count % self.batch_size if self.drop_last and self.plain else count
        return Share(samples if self.plain or not self.batched else None, self.batch_size, self._count_batches(count))

    def _count_items(self, count: Callable[[Any], Any]) -> Any:
        """Return the length of the user's sampler, and restore the RNG state if computing the length changes it."""
        if not self._counting_draws:
            return count(self.sampler)
        state = host_state()
        items = count(self.sampler)
        self._counting_draws = not are_equal(state, host_state())
        set_host_state(state)
        return items

    def count_leaves(self, items: int | None = None) -> int:
        """Return the number of global batches of ``items`` items of the sampler. Default: those of an epoch."""
        count, remainder = divmod(self._count_items(len) if items is None else items, self.width)
        return count + (bool(remainder) and not self.drop_last)

    def _count_batches(self, items: int, limit: int | None = None) -> int:
        size, tree = self.planner.size, self.planner.tree
        count = self.count_leaves(items)
        remainder = items % self.width
        if tree is not None:
            return tree.rows(count if limit is None else min(count, tree.leaves_in(limit)))
        if limit is not None and limit < count:
            return limit
        merged = self.plain and self.merge_tail and count > 1 and 0 < remainder < size and not self.drop_last
        return count - merged

    def length(self, limit: int | None) -> int | None:
        """Return the number of batches in an epoch, at most ``limit``; ``limit`` if the sampler has no length."""
        return limit if self._count_items(get_length) is None else self.total(limit)

    @property
    def width(self) -> int:
        """Number of items of the user's sampler in a full batch, over all ranks that share it."""
        return self.batch_size * self.planner.size if self._split_batch is None else 1

    @property
    def full(self) -> int:
        """Number of samples in a full batch, over all ranks; a batch of a custom batch sampler counts as 1."""
        return self.width * self.planner.world_size // self.planner.size

    @property
    def left_out(self) -> Counter[str]:
        """Number of items of the user's sampler that ``drop_last`` drops per epoch, by unit."""
        count = self._count_items(get_length)
        dropped = count % self.width if self.drop_last and count is not None else 0
        return +Counter({"sample" if self.plain or not self.batched else "batch": dropped})

    def items(self, samples: int, batches: int) -> int:
        """Return how many of the sampler's items (samples or custom batches) precede a position, over all ranks."""
        if self.plain or not self.batched:
            return samples
        tree = self.planner.tree
        return batches * self.full if tree is None else tree.leaves_in(batches)

    def batches_of(self, items: int) -> int:
        """Return the number of this process's batches that correspond to ``items`` items of the user's sampler."""
        if self.planner.tree is not None:
            return self.planner.tree.rows(-(-items // self.width))
        count = self._count_items(get_length)
        if count is None or self.planner.shares is not None:
            return -(-items // self.full)
        return self._count_batches(count) - self._count_batches(max(0, count - items))

    def __len__(self) -> int:
        return self.total(self.limit)

    def _take_drawn(self) -> Draw | None:
        return None if self._copy is None else self._copy.take()

    # -- order ---------------------------------------------------------------------------------------------------

    def _open(self) -> Iterator[Any]:
        """Return an iterator over the epoch's batches; draw their order, or repeat the draw in a resumed epoch."""
        draws = self.draws
        with draws.stream.drawing():
            self._rewind()
            start_state = draws.state()
            order = self.position.order
            is_repeated = order is not None
            if order is None:
                order = start_state
                draws.note_counts()
            else:
                draws.load(order)
            self.position.begin(order)
            plan = self._plan_batches if self.planner.tree is None else self._plan_leaves
            batches = plan(seed_from(order["stream"], self._name_seed_purpose()))
            first = list(itertools.islice(batches, 1))
            if self.planner.shares is not None:
                self._keep_in_step(start_state)
            self._compare_order()
            if is_repeated:  # the state already contains what the sampler draws here
                draws.stream.go_to(start_state["stream"])
                if self.draws_at_once or self.limit == 0:  # if nothing is left to yield, nothing was drawn again
                    draws.load_private(start_state["generators"])
                    draws.load_samplers(start_state)
        if not is_repeated and not self.positions and self.micros and (drawn := self.micros[0][1]) is not None:
            draws.stream.follow(drawn)  # before the dataset, which this process reads, draws for the first batch
        return itertools.chain(first, batches)

    @property
    def sampler_name(self) -> str:
        """Class name of the sampler; for a custom batch sampler, followed by that of its sampler in brackets."""
        within = getattr(self.sampler, "sampler", None) if self.batched and not self.plain else None
        return type(self.sampler).__name__ + ("" if within is None else f"({type(within).__name__})")

    def describe_position(self, drawn: Draw | None) -> dict[str, Any]:
        """Return the sampler's name, and the number and a digest of the epoch's first indices up to the position.

        It is not named ``state_dict``, which torchdata's StatefulDataLoader calls on its batch sampler.
        """
        summary, first = self._expected, self._first_indices[: min(self.position.samples, _COMPARED)]
        if summary is None and first and self.position.order is not None:
            summary = len(first), digest(first)
        return {"source": None, "workers": None, "sampler": self.sampler_name, "first_indices": summary}

    def resume_at(self, state: dict[str, Any]) -> None:
        """Prepare for the epoch that a state returned by `describe_position` belongs to; see `expect_order`."""
        self._expected, self._first_indices = None, []

    def expect_order(self, state: dict[str, Any]) -> None:
        """Compare the next epoch's first indices with those of a state returned by `describe_position`."""
        self._expected = state["first_indices"]

    def _compare_order(self) -> None:
        """Warn if a resumed epoch begins with other indices than the saved one."""
        expected, self._expected = self._expected, None
        if expected is not None and expected[0] <= len(self._first_indices):
            count, saved = expected
            if digest(self._first_indices[:count]) != saved:
                warn_order_changed(f"the first indices of {self.sampler_name} differ from those of the saved epoch")

    def _name_seed_purpose(self) -> int | str:
        rank = 0 if self.planner.shares is None else self.planner.world_rank
        return f"epoch {self.start.epoch} of rank {rank}" if rank else self.start.epoch

    def _keep_in_step(self, start_state: dict[str, Any]) -> None:
        """Advance the run's stream equally on all ranks, because their orders may differ in length."""
        stream = self.draws.stream
        stream.go_to(start_state["stream"])
        stream.advance()

    def _pull(self, block: int) -> Iterator[Any]:
        self._copy = None
        if type(self.sampler) is RandomSampler and self.sampler.generator is not None:
            # It draws again at its end, which workers reach at another time than the loop.
            return iter(list(self.sampler))
        source = avoid_rewind(iter(self.sampler))
        if self.draws_at_once:
            return source
        # Workers that read ahead, and validation loaders in between, would otherwise change what the sampler draws.
        self._copy = CopiedStream(self.draws.stream)
        return _draw_in_blocks(self._copy, source, block)

    def _read_global_batches(self) -> Iterator[tuple[list[Any], list[int] | None]]:
        """Yield global batches as flat indices, with the sizes of the ranks' batches; None for even shares."""
        width = self.width
        skip = self.start.samples if self.planner.shares is None else 0  # with data of its own, a rank skips batches
        items = self._pull(width)
        first = self._first_indices = []
        in_batches = self.batched and not self.plain
        if in_batches:
            skipped = 0
            while skipped < skip and (batch := next(items, None)) is not None:
                skipped += len(batch)
                if len(first) < _COMPARED:
                    first += batch
        else:
            first += itertools.islice(items, min(skip, _COMPARED))
            next(itertools.islice(items, skip - len(first), skip - len(first)), None)
        if skip:
            self._take_drawn()  # the run's stream has followed the copy up to here
        while group := list(itertools.islice(items, width)):
            is_full = len(group) == width
            indices = list(itertools.chain.from_iterable(group)) if in_batches else group
            if len(first) < _COMPARED:
                first += indices
            if self._split_batch is not None and self.planner.size > 1:
                group = self._split_batch(group[0], self.planner.size)
                indices = list(itertools.chain.from_iterable(group))
            if is_full:
                yield indices, [len(batch) for batch in group] if in_batches else None
            elif not self.drop_last:
                yield indices, None

    def _read_groups(self) -> Iterator[tuple[list[tuple[list[Any], list[int] | None]], list[int]]]:
        """Yield groups of global batches, each with the numbers of samples in its batches."""
        tree, limit, passing = self.planner.tree, self.limit, self.start.passing
        if tree is not None:
            limit, passing = None if limit is None else tree.leaves_in(limit), tree.leaves_in(passing)
        batches: Iterator[Any] = itertools.islice(self._read_global_batches(), limit)
        if self.merge_tail:
            batches = _merge_tail(batches, self.planner.size)
        for indices, _ in itertools.islice(batches, passing):
            self._advance(len(indices))
        for number in itertools.count():
            if not (group := list(itertools.islice(batches, self.planner.accumulate(number)))):
                return
            yield group, [len(indices) for indices, _ in group]

    def _advance(self, samples: int) -> None:
        self.start.samples += samples
        self.position.samples += samples

    def _read_rank_groups(
        self, shares: RankShares
    ) -> Iterator[tuple[list[tuple[list[Any], list[int] | None]], list[int]]]:
        """Yield the groups of this rank's own data until every rank has read all of its data."""
        batches, placeholder = self._read_global_batches(), list[Any]()
        for indices, _ in itertools.islice(batches, self.start.batches):
            placeholder = indices[:1]
        first, remaining, name = self.start.batches, self.limit, type(self.sampler).__name__
        passed, number = self.start.passing, 0
        while remaining is None or remaining > 0:
            width = passed or self.planner.accumulate(number)
            group = list(itertools.islice(batches, width if remaining is None else min(remaining, width)))
            totals = shares.totals(first, [len(indices) for indices, _ in group], width, name)[:remaining]
            if not totals:
                return
            placeholder = group[-1][0][:1] if group else placeholder
            group += [(placeholder, [0])] * (len(totals) - len(group))
            first, remaining = first + len(totals), None if remaining is None else remaining - len(totals)
            if passed:
                self._advance(sum(totals))
                passed = 0
            else:
                number += 1
                yield group, totals

    def _plan_leaves(self, epoch_seed: int) -> Iterator[Any]:
        """Yield this rank's micro-batches of each step in a `FixedTree`."""
        epoch, first = (epoch_seed, self.dataset_epoch), 0
        for number, (group, sizes) in enumerate(self._read_groups()):
            first = first if number else self.start.samples
            plan, drawn = self.planner.plan_leaves(sizes), self._take_drawn()
            starts = list(itertools.accumulate(sizes, initial=first))
            leaves = [0 if leaf is None else leaf for leaf, _ in plan]
            group_indices = GroupIndices(
                [group[leaf] for leaf in leaves],
                [slice(micro.samples) for _, micro in plan],
                tuple(seed_at(epoch_seed, starts[leaf]) for leaf in leaves),
            )
            for leaf, (_, micro) in zip(leaves, plan, strict=True):
                indices = group[leaf][0]  # all of them also for a placeholder, which then uses the same parameters
                self.micros.append((micro, drawn, group_indices))
                items = [(epoch, starts[leaf] + offset, index) for offset, index in enumerate(indices)]
                yield items if self.batched else items[0]
            first += sum(sizes)

    def _plan_batches(self, epoch_seed: int) -> Iterator[Any]:
        rank, size, shares = self.planner.rank, self.planner.size, self.planner.shares
        micros, positions, batched = self.micros, self.positions, self.batched
        consumed: int | None = None
        epoch = epoch_seed, self.dataset_epoch  # one object for all samples, so that pickle writes it once per batch
        planned: list[int] | None = None
        for group, totals in self._read_groups() if shares is None else self._read_rank_groups(shares):
            if consumed is None:
                consumed = self.start.samples
            if totals != planned:  # most groups equal the previous one
                # A user's own batches may have other sizes, and so may those of ranks with their own data.
                planned = totals if group[0][1] is None and shares is None else None
                parts = [_cut_share(indices, widths, rank, size) for indices, widths in group]
                plan = self.planner.plan([(p.stop - p.start, n) for p, n in zip(parts, totals, strict=True)])
            drawn = self._take_drawn() if shares is None else None
            group_indices = GroupIndices(group, parts)
            for number, micro in enumerate(plan):
                indices = group[number][0]
                # An empty share is replaced by one sample of weight zero, so that the collectives match.
                local_indices = indices if size == 1 else indices[parts[number]] or indices[:1]
                if positions:
                    first = consumed + parts[number].start  # with data of its own, each rank has its own seed
                    local_indices = [(epoch, first + offset, index) for offset, index in enumerate(local_indices)]
                micros.append((micro, drawn, group_indices))
                consumed += micro.everyone
                yield local_indices if batched else local_indices[0]


def _draw_in_blocks(stream: RandomStream, source: Iterator[Any], block: int) -> Iterator[Any]:
    while True:
        with stream.drawing():  # expensive, hence in blocks
            items = list(itertools.islice(source, block))
        if not items:
            return
        yield from items


def _cut_share(indices: list[Any], widths: list[int] | None, rank: int, size: int) -> slice:
    if widths is None:
        return share(len(indices), rank, size)
    start = sum(widths[:rank])
    return slice(start, start + widths[rank])


def _merge_tail(batches: Iterator[Any], size: int) -> Iterator[Any]:
    """Yield global batches; merge a last one with fewer than ``size`` samples into the batch before it."""
    previous = next(batches, None)
    for indices, widths in batches:
        assert previous is not None
        if widths is None and len(indices) < size:
            yield [*previous[0], *indices], None
            return
        yield previous
        previous = indices, widths
    if previous is not None:
        yield previous


def shards_itself(loader: Any) -> bool:
    """Return whether a loader's sampler already gives each process its own share, like ``DistributedSampler``.

    Args:
        loader: The user's loader.
    """
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    return any(
        isinstance(s, DistributedSampler)
        or (hasattr(s, "rank") and (hasattr(s, "num_replicas") or hasattr(s, "world_size")))
        for s in samplers
    )


def set_epoch(loader: Any, epoch: int, nested: bool = True) -> None:
    """Call ``set_epoch`` on ``loader``, its dataset and its samplers, as far as they have this method.

    With ``nested``, this includes the datasets in a ``Subset`` or another container of torch without the method.
    """
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    owners = (
        loader,
        *iter_epoch_owners(getattr(loader, "dataset", None), nested),
        sampler,
        getattr(sampler, "sampler", None),  # a batch sampler may take its place
        batches,
        getattr(batches, "sampler", None),
    )
    for owner in {id(owner): owner for owner in owners}.values():
        if callable(method := getattr(owner, "set_epoch", None)):
            method(epoch)
