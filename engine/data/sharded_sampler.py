"""Which samples, in which order, and which of them are this process's."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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
from ..rng import Draw, RandomStream, State, are_equal, host_state, seed_from, set_host_state
from .batch_digest import digest
from .dataset_check import get_length, share_data
from .micro_batches import GroupPlanner, Micro, avoid_rewind, share
from .rank_shares import RankShares, Share, compare_across_ranks
from .sampler_rng import Draws, preserve_loader_state
from .seedable_sampler import SeedableRandomSampler

# These draw when an epoch begins and never again, so nothing has to be lent to them later.
_DRAW_ONCE = (SequentialSampler, RandomSampler, SeedableRandomSampler, SubsetRandomSampler, WeightedRandomSampler)

_COMPARED = 64  # indices


class GroupIndices(NamedTuple):
    """The indices that the micro-batches of one group were dealt.

    Attributes:
        global_batches: of all processes; with the sizes of the user's own batches where those are kept.
        slices: this process's share of each.
    """

    global_batches: list[tuple[list[Any], list[int] | None]]
    slices: list[slice]

    def of(self, number: int) -> list[Any]:
        """Return this process's indices in one micro-batch; none for a stand-in."""
        return self.global_batches[number][0][self.slices[number]]


class ShardedBatches:
    """A batch sampler that replays the user's own sampler and keeps this process's part of each global batch.

    A global batch is the next ``batch_size * size`` indices of the user's sampler, or the next ``size`` batches of a
    batch sampler of the user's own. The last, short one is shared out as it is: nothing is padded or repeated.

    Args:
        loader: the user's loader; only its samplers are used.
        planner: groups and weights.
        stream: what the samplers draw from where they have no generator of their own.
        merge_tail: evaluation only: where the last global batch has fewer samples than there are processes, add them
            to the one before, so that every process takes part in every batch.
        positions: yield ``(epoch seed, position, index)`` triples, for workers that seed each sample.

    Attributes:
        order: what the epoch's order was drawn from; where it is set before the epoch begins, that epoch comes again.
        micros: of the batches that were yielded and not yet taken by the loop: the facts, what was drawn for them from
            a copy of the stream (None where the epoch's order was drawn at once), and the indices of their group.
    """

    def __init__(
        self, loader: DataLoader[Any], planner: GroupPlanner, stream: RandomStream, merge_tail: bool, positions: bool
    ) -> None:
        batches = loader.batch_sampler
        self.plain = type(batches) is BatchSampler
        self.batched = batches is not None
        unit: Any = batches if self.batched else loader.sampler
        self.sampler: Iterable[Any] = unit.sampler if self.plain else unit
        self.batch_size = int(getattr(batches, "batch_size", None) or 1) if self.plain else 1
        self.drop_last = bool(getattr(batches, "drop_last", False))
        self._loader = loader
        self.dataset = loader.dataset
        self.planner = planner
        self.merge_tail = merge_tail and self.batched
        self.positions = positions
        self.draws = Draws(stream, loader, (batches, self.sampler))
        self.draws_at_once = type(self.sampler) in _DRAW_ONCE
        self._counting_draws = not self.draws_at_once  # until the first count shows otherwise
        self.order: dict[str, Any] | None = None
        self._undo: dict[str, Any] | None = None
        self._rest: RandomStream | None = None
        self._taken: State | None = None  # where that was when the batches planned last were drawn
        self.begin(0, 0, None)

    def begin(self, epoch: int, skip: int, limit: int | None, done: int = 0, passed: int = 0) -> None:
        """Set what the next iteration is.

        Args:
            epoch: its number.
            skip: samples of it that were yielded before, over all ranks.
            limit: the most batches to yield.
            done: batches of this rank that these samples were in.
            passed: batches to pass over beyond these.
        """
        self.epoch, self.skip, self.limit = epoch, skip, limit
        self.done = done
        self.passed, self.passed_samples = passed, 0
        self.micros: deque[tuple[Micro, Draw | None, GroupIndices]] = deque()

    def split(self) -> None:
        """Take ``batch_size`` for that of the global batch.

        Raises:
            ValueError: if the processes can not share it evenly, or there is none.
        """
        size = self.planner.size
        if not self.plain or self.batch_size % size:
            actual = f"batch_size={self.batch_size}" if self.plain else "a batch sampler of its own"
            raise ValueError(
                f"split_batches=True shares each batch out to {size} processes, so DataLoader(batch_size=) must be a "
                f"multiple of {size}; this loader has {actual}."
            )
        self.batch_size //= size

    @property
    def draws_later(self) -> bool:
        """Whether the order is drawn as the epoch goes, and not all of it at its beginning."""
        return not self.draws_at_once

    def unshuffle(self) -> bool:
        """Take the dataset's order where torch's own samplers shuffle it.

        Returns:
            Whether there is, or was, a shuffle.
        """
        sampler = self.sampler
        if isinstance(sampler, RandomSampler):
            self.sampler = SequentialSampler(sampler.data_source)
        elif isinstance(sampler, SubsetRandomSampler):
            self.sampler = list(sampler.indices)
        else:
            return type(sampler) is not SequentialSampler and bool(getattr(sampler, "shuffle", True))
        self.draws_at_once = True
        return True

    def start(self, get_iterator: Callable[[], Iterator[Any]], silently: bool) -> Iterator[Any]:
        """Start the loader's iterator; the seed that it draws for its workers comes from the stream.

        Args:
            get_iterator: starts it.
            silently: as if it had drawn no seed, as in a run that goes on and had drawn it already.
        """
        self._undo = self.draws.state() if silently or self.order is not None else None
        with self.draws.stream.drawing():
            iterator = get_iterator()
            self._rewind()  # other loaders may draw before the first batch comes
        return iterator

    def _rewind(self) -> None:
        if self._undo is not None:
            self.draws.rewind(self._undo)
            self._undo = None

    def __iter__(self) -> Iterator[Any]:
        # A generator: nothing may be drawn before the loader has drawn its workers' seed, as in a plain loop.
        yield from self._open()

    def total(self, limit: int | None) -> int:
        """Batches this process yields in a whole epoch, no more than ``limit``.

        Raises:
            TypeError: if the user's sampler has no length.
        """
        shares = self.planner.shares
        if shares is not None and shares.batches is not None:
            return shares.batches if limit is None else min(shares.batches, limit)
        return self._count_batches(self._count_items(len), limit)

    def agree(self, world: World) -> None:
        """Find out whether the ranks share out one dataset in one order, or each reads its own. All ranks must ask.

        Raises:
            ValueError: on every rank, if it is neither.
        """
        if self.planner.shares is None and not share_data(self.dataset, world):
            self.planner.disable_sharding()
        if self.planner.shares is None:
            self.draws.agree(world)
            if not self._has_common_order(world):
                self.planner.disable_sharding()
        if self.planner.shares is not None:
            self.planner.shares.agree(self.share(), world, type(self.dataset).__name__)

    def _has_common_order(self, world: World) -> bool:
        """Whether the user's sampler yields the same on all ranks; one that looks at the rank does not.

        Raises:
            ValueError: on every rank, if some ranks' samplers agree and others do not.
        """
        if type(self.sampler).__module__ == Sampler.__module__:  # torch's own know of no rank
            return True
        before = self.draws.stream.get_state()
        with self.draws.stream.drawing(), preserve_loader_state(self._loader):
            first = list(itertools.islice(avoid_rewind(iter(self.sampler)), _COMPARED))
        self.draws.stream.go_to(before)
        return compare_across_ranks(digest(first), type(self.sampler).__name__, "indices", world)

    def share(self) -> Share:
        """How long this rank's own data is."""
        count = self._count_items(get_length)
        if count is None:
            return Share(None, self.batch_size, None)
        samples = count - count % self.batch_size if self.drop_last and self.plain else count
        return Share(samples if self.plain or not self.batched else None, self.batch_size, self._count_batches(count))

    def _count_items(self, count: Callable[[Any], Any]) -> Any:
        """The length of the user's sampler, whatever it draws to know it: nobody asks as often as a plain loop does."""
        if not self._counting_draws:
            return count(self.sampler)
        before = host_state()
        items = count(self.sampler)
        self._counting_draws = not are_equal(before, host_state())
        set_host_state(before)
        return items

    def _count_batches(self, items: int, limit: int | None = None) -> int:
        """Batches this process makes of so many of the user's sampler's last items, no more than ``limit``."""
        size = self.planner.size
        count, rest = divmod(items, self.width)
        count += bool(rest) and not self.drop_last
        if limit is not None and limit < count:
            return limit
        merged = self.plain and self.merge_tail and count > 1 and 0 < rest < size and not self.drop_last
        return count - merged

    def length(self, limit: int | None) -> int | None:
        """As `total`; without a length the limit, if there is one."""
        return limit if self._count_items(get_length) is None else self.total(limit)

    @property
    def width(self) -> int:
        """Items of the user's sampler in a full batch, over all the ranks that share it out."""
        return self.batch_size * self.planner.size

    @property
    def full(self) -> int:
        """Samples in a full batch, over all ranks; batches, where a batch sampler of the user's own cuts them."""
        return self.batch_size * self.planner.world_size

    @property
    def left_out(self) -> int:
        """Samples of each epoch that ``drop_last`` leaves out: those of a last, short global batch."""
        count = self._count_items(get_length)
        return count % self.width if self.drop_last and count is not None else 0

    def items(self, samples: int, batches: int) -> int:
        """Items of the ranks' samplers in this epoch's first ``batches``, which hold ``samples``."""
        return batches * self.full if self.batched and not self.plain else samples

    def batches_of(self, items: int) -> int:
        """Batches of this process that ``items`` of the user's sampler stand for: with those to come, an epoch's."""
        count = self._count_items(get_length)
        if count is None or self.planner.shares is not None:
            return -(-items // self.full)
        return self._count_batches(count) - self._count_batches(max(0, count - items))

    def __len__(self) -> int:
        return self.total(self.limit)

    def _note_passed(self, skip: int) -> None:
        if skip:  # the process has followed the copy up to here
            self.take_drawn()

    def take_drawn(self) -> Draw | None:
        """Return what was drawn from a copy of the stream since the last call; None where it was drawn at once."""
        if self._rest is None:
            return None
        before, self._taken = self._taken, self._rest.state
        assert before is not None
        return Draw(before, self._taken)

    # -- order ---------------------------------------------------------------------------------------------------

    def _open(self) -> Iterator[Any]:
        """Draw the epoch's order now, or draw it once more."""
        draws = self.draws
        with draws.stream.drawing():
            self._rewind()
            start_state = draws.state()
            again = self.order is not None
            if self.order is None:
                self.order = start_state
                draws.note_counts()
            else:
                draws.load(self.order)
            batches = self._plan_batches(seed_from(self.order["stream"], self._name_seed_purpose()))
            first = list(itertools.islice(batches, 1))
            if self.planner.shares is not None:
                self._keep_in_step(start_state)
            if again:  # what it draws here is in there already
                draws.stream.go_to(start_state["stream"])
                if self.draws_at_once or self.limit == 0:  # with nothing left to yield, nothing was drawn again
                    draws.load_private(start_state["generators"])
                    draws.load_samplers(start_state)
        if not again and not self.positions and self.micros and (drawn := self.micros[0][1]) is not None:
            draws.stream.follow(drawn)  # before the dataset, which this process reads, draws for the first batch
        return itertools.chain(first, batches)

    def _name_seed_purpose(self) -> int | str:
        """What the seed of the epoch's workers is for: ranks with data of their own draw numbers of their own."""
        rank = 0 if self.planner.shares is None else self.planner.world_rank
        return f"epoch {self.epoch} of rank {rank}" if rank else self.epoch

    def _keep_in_step(self, before: dict[str, Any]) -> None:
        """Let the run's stream follow from what all ranks know: each has drawn an order of its own length."""
        stream = self.draws.stream
        stream.go_to(before["stream"])
        stream.advance()

    def _pull(self, block: int) -> Iterator[Any]:
        """The user's sampler, item by item, drawing from the stream and not from the process's own state."""
        self._rest = None
        if type(self.sampler) is RandomSampler and self.sampler.generator is not None:
            # It draws once more at its end, which workers reach at another time than the loop does.
            return iter(list(self.sampler))
        source = avoid_rewind(iter(self.sampler))
        if self.draws_at_once:
            return source
        # A sampler that draws as it goes has a stream of its own from here, or the workers' reading ahead and the
        # validation loaders between would change what it draws.
        self._rest = RandomStream(self.draws.stream.get_state())
        self._taken = self._rest.state
        return _draw_in_blocks(self._rest, source, block)

    def _read_global_batches(self) -> Iterator[tuple[list[Any], list[int] | None]]:
        """Global batches as flat indices; with the sizes of the user's own batches where those must be kept."""
        size, width = self.planner.size, self.width
        skip = self.skip if self.planner.shares is None else 0  # of data of its own a rank passes over batches
        items = self._pull(width)
        if self.plain:
            next(itertools.islice(items, skip, skip), None)
            self._note_passed(skip)
            while chunk := list(itertools.islice(items, width)):
                if len(chunk) == width or not self.drop_last:
                    yield chunk, None
            return
        skipped = 0
        while skipped < skip and (item := next(items, None)) is not None:
            skipped += len(item) if self.batched else 1
        self._note_passed(skip)
        while batches := list(itertools.islice(items, size)):
            if not self.batched:
                yield batches, None
            elif len(batches) == size:
                yield list(itertools.chain.from_iterable(batches)), [len(batch) for batch in batches]
            elif not self.drop_last:
                yield list(itertools.chain.from_iterable(batches)), None

    def _read_groups(self) -> Iterator[tuple[list[tuple[list[Any], list[int] | None]], list[int]]]:
        """Groups of global batches, each with the samples of its batches."""
        batches: Iterator[Any] = itertools.islice(self._read_global_batches(), self.limit)
        if self.merge_tail:
            batches = _merge_tail(batches, self.planner.size)
        for indices, _ in itertools.islice(batches, self.passed):
            self.passed_samples += len(indices)
        while group := list(itertools.islice(batches, self.planner.accumulate())):
            yield group, [len(indices) for indices, _ in group]

    def _read_rank_groups(
        self, shares: RankShares
    ) -> Iterator[tuple[list[tuple[list[Any], list[int] | None]], list[int]]]:
        """As `_read_groups`, where each rank reads data of its own: until the last rank has read it."""
        batches, stand_in = self._read_global_batches(), list[Any]()
        for indices, _ in itertools.islice(batches, self.done):
            stand_in = indices[:1]
        first, left, name = self.done, self.limit, type(self.sampler).__name__
        passed = self.passed
        while left is None or left > 0:
            width = passed or self.planner.accumulate()
            group = list(itertools.islice(batches, width if left is None else min(left, width)))
            totals = shares.totals(first, [len(indices) for indices, _ in group], width, name)[:left]
            if not totals:
                return
            stand_in = group[-1][0][:1] if group else stand_in
            group += [(stand_in, [0])] * (len(totals) - len(group))
            first, left = first + len(totals), None if left is None else left - len(totals)
            if passed:
                self.passed_samples, passed = sum(totals), 0
            else:
                yield group, totals

    def _plan_batches(self, epoch_seed: int) -> Iterator[Any]:
        rank, size, shares = self.planner.rank, self.planner.size, self.planner.shares
        micros, positions, batched = self.micros, self.positions, self.batched
        consumed: int | None = None
        planned: list[int] | None = None
        for group, totals in self._read_groups() if shares is None else self._read_rank_groups(shares):
            if consumed is None:
                consumed = self.skip + self.passed_samples
            if totals != planned:  # most groups are like the one before
                # Batches of the user's own may be cut otherwise, and those of ranks with data of their own too.
                planned = totals if group[0][1] is None and shares is None else None
                parts = [_cut_share(indices, widths, rank, size) for indices, widths in group]
                plan = self.planner.plan([(p.stop - p.start, n) for p, n in zip(parts, totals, strict=True)])
            drawn = self.take_drawn() if shares is None else None
            group_indices = GroupIndices(group, parts)
            for number, micro in enumerate(plan):
                indices = group[number][0]
                # An empty share takes part with one sample of weight zero, so that the collectives match.
                local_indices = indices if size == 1 else indices[parts[number]] or indices[:1]
                if positions:
                    first = consumed + parts[number].start  # with data of its own, each rank has a seed of its own
                    local_indices = [(epoch_seed, first + offset, index) for offset, index in enumerate(local_indices)]
                micros.append((micro, drawn, group_indices))
                consumed += micro.everyone
                yield local_indices if batched else local_indices[0]


def _draw_in_blocks(stream: RandomStream, source: Iterator[Any], block: int) -> Iterator[Any]:
    while True:
        with stream.drawing():  # dear, hence in blocks
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
    """Add a last batch of fewer than ``size`` samples to the one before it."""
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
    """Whether a loader's sampler gives each process a part of its own, as a ``DistributedSampler`` does."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    return any(
        isinstance(s, DistributedSampler)
        or (hasattr(s, "rank") and (hasattr(s, "num_replicas") or hasattr(s, "world_size")))
        for s in samplers
    )


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the dataset and the samplers of ``loader`` that have a ``set_epoch`` which epoch begins."""
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    owners = (
        getattr(loader, "dataset", None),
        sampler,
        getattr(sampler, "sampler", None),  # a batch sampler may stand in its place
        batches,
        getattr(batches, "sampler", None),
    )
    for owner in {id(owner): owner for owner in owners}.values():
        if callable(method := getattr(owner, "set_epoch", None)):
            method(epoch)
