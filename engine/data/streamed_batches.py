"""Batches from a source that cannot be indexed: an IterableDataset, a generator, or any other iterable of batches.

State of the supply in an iteration, `_Supply`::

               reading ahead finds the end       a group lacks batches
        OPEN ----------------------------> READ -----------------------> ENDED
         |                                                                 ^
         +-- a group lacks batches, or a resume finds the end as it skips -+

Where batches are dealt to the ranks, a short batch at the end of a group also ends the supply, and a full group after
it opens the supply again, because other workers may still have batches.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

from torch import nn
from torch.utils.data import DataLoader

from ...common.messages import announce, format_count, warn
from ...strategies import World
from ..rng import Draw, State, seed_from
from .dataset_check import digest, get_length
from .epoch_position import EpochPosition
from .micro_batches import Cursor, GroupPlanner, Micro, avoid_rewind, share, split_size
from .rank_shares import Outlook, RankShares, Share, compare_across_ranks
from .sampler_rng import CopiedStream, Draws, get_stateful
from .source_libraries import copies_state, split_over
from .workers import TORCH_SEEDED, SeededStream, begin_epoch, note_workers


class Counted:
    """Wrapper of the user's collate function that splits each batch, and also returns the numbers of samples.

    Attributes:
        size: The number of samples in a full batch.
        pieces: The number of pieces that each batch is split into.
    """

    def __init__(self, collate: Callable[[Any], Any], size: int) -> None:
        self.collate, self.size, self.pieces = collate, size, 1

    def __call__(self, samples: list[Any]) -> list[tuple[int, Any]]:
        """Return the number of samples and the collated batch of each piece; an empty piece is collated of a sample."""
        parts = [samples[share(len(samples), number, self.pieces)] for number in range(self.pieces)]
        return [(len(part), self.collate(part or samples[:1])) for part in parts]


def make_batches_error(source: Any) -> ValueError:
    """Return the error for a loader whose custom ``__iter__`` yields fewer or more batches than it reads."""
    return ValueError(
        f"{type(source).__name__} does not yield one batch for each batch that it reads, so it cannot be sharded over "
        "several processes. Let its __iter__ yield one batch for each batch from super().__iter__(), pass an iterable "
        "of batches (prepare_data_loader(iter(loader))), or let each process read its own data "
        "(Trainer(use_distributed_sampler=False) or prepare_data_loader(loader, shard=False))."
    )


def has_user_iter(source: Any) -> bool:
    """Return whether this is a DataLoader whose ``__iter__`` is user-defined, and not a copy of torch's (torchdata)."""
    return isinstance(source, DataLoader) and (
        type(source).__iter__ is not DataLoader.__iter__ and "_get_iterator" not in _list_names(source)
    )


def reads_other_loaders(source: DataLoader[Any]) -> bool:
    """Return whether a user-defined ``__iter__`` calls neither ``super().__iter__`` nor what it is made of."""
    return not {"super", "__iter__", "_get_iterator", "dataset", "sampler", "batch_sampler"} & _list_names(source)


def _list_names(source: DataLoader[Any]) -> set[str]:
    code = getattr(type(source).__iter__, "__code__", None)
    return {"super"} if code is None else {*code.co_names}


class Unwrapped:
    """Iterator over the pieces of the batches of `Counted`, which appends their sizes to ``sizes``.

    ``pieces`` holds the rest of the batch that was read last.
    """

    def __init__(self, iterator: Iterator[Any], pieces: deque[tuple[int, Any]], sizes: deque[int]) -> None:
        self.iterator, self.pieces, self.sizes = iterator, pieces, sizes

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.pieces:
            self.pieces.extend(next(self.iterator))
        size, batch = self.pieces.popleft()
        self.sizes.append(size)
        return batch

    def __getattr__(self, name: str) -> Any:  # a DataLoader resets the iterator of its persistent workers
        if name == "iterator":
            raise AttributeError(name)
        return getattr(self.iterator, name)


@dataclass(slots=True, frozen=True)
class BatchAhead:
    """Batch that was read ahead of the loop.

    Attributes:
        size: The number of samples in the batch; 1 if batch sizes are unknown.
        state: The state of the source before the batch was read, if it has one.
        drawn: The states of the random stream before and after the batch was read; None if this process draws nothing.
    """

    size: int
    batch: Any
    state: Any
    drawn: Draw | None


class _Supply(Enum):
    OPEN = auto()
    READ = auto()  # reading ahead has reached the end of the source; the loop has not
    ENDED = auto()


class StreamedBatches:
    """Reader that groups the batches of a stream into optimizer steps and weights them by their samples.

    A stream that is already split by rank is read unchanged: each rank trains on the batches of its own stream. A
    stream that is the same on all ranks is read completely by every rank, and its batches are dealt to the ranks in
    turn. The first batches are compared across ranks to determine which case applies, unless this is known. A rank
    without a batch takes part with weight zero. `split` makes each batch a global one, of which every rank keeps a
    piece.

    ``collate`` is None if all batches have the same weight. ``draws_later`` means that this process reads the source
    itself, which then draws from the run's random stream. ``stateful`` is the object that saves and restores the
    position of the source; if it is None, ``gap`` may hold the reason.

    Attributes:
        position: The position of the dataloader, which the loop advances.
        start: The position at which the current iteration began.
        counted: The number of samples in a full batch, or in a full piece of it; None if all have the same weight.
        pieces: The pieces of the batch that the source yielded last, unless they were read.
        sizes: The numbers of samples in the batches that the source has created but not yet yielded.
        compare: The ranks whose first batches have not been compared yet, if any.
        first_digest: Digest of the epoch's first batch, to check that a resume reads the same batches; "" if unchecked.
        dataset_epoch: The number that ``set_epoch`` of the source receives for the next epoch.
    """

    def __init__(
        self,
        source: Any,
        collate: Counted | None,
        planner: GroupPlanner,
        draws: Draws,
        position: EpochPosition,
        draws_later: bool,
        stateful: Any,
        gap: str = "",
        cursor: Cursor | None = None,
    ) -> None:
        self.source, self.planner, self.position, self.cursor = source, planner, position, cursor
        self.draws, self.draws_later, self.stateful, self.gap = draws, draws_later, stateful, gap
        self.compare: World | None = None
        self.first_digest = self._expected = ""  # the digests of the epoch, and of the one that is resumed
        self._pushed: deque[tuple[int, Any]] = deque()  # read for a comparison
        self._collate, self._split = collate, 1  # the number of pieces that each batch is split into
        self.counted = None if collate is None else collate.size
        # A loader that knows its position may read the epoch again by itself, with the numbers of its beginning.
        self._draws_here = (
            draws_later and not getattr(source, "num_workers", 0) and not isinstance(stateful, DataLoader)
        )
        self._loaded_state: dict[str, Any] | None = None  # until the source is started
        self._copy: CopiedStream | None = None  # the source draws from it, and reads ahead of the loop
        self._repeats = False  # whether the source is read as in an earlier iteration
        self._copy_state: State | None = None  # the state with which it continues once the source is open
        self.seeded: SeededStream | None = None  # the dataset, if its workers outlive an epoch
        self.dataset_epoch = 0
        self.workers: dict[str, Any] | None = None  # the state that they were started from
        self.sizes, self.pieces = deque[int](), deque[tuple[int, Any]]()
        self._read_batches: deque[BatchAhead] = deque()  # that the loop has not received, the next one first
        self._outlooks: deque[Outlook | None] = deque()  # for the coming groups, the next one first
        self._begin(None)

    def _begin(self, limit: int | None) -> None:
        self.start, self.limit = replace(self.position), limit
        for queue in (self.sizes, self.pieces, self._pushed, self._read_batches, self._outlooks):
            queue.clear()
        self._supply = _Supply.OPEN
        self._count = 0  # of the batches that the source has yielded in this epoch
        self._state_at_end: Any = None  # the source's state before its end
        self.micros: deque[tuple[Micro, Draw | None, None]] = deque()

    @property
    def full(self) -> int:
        """Number of samples in a full batch, over all ranks; a batch of unknown size counts as 1."""
        return (self.counted or 1) * self.planner.world_size

    left_out: ClassVar[Counter[str]] = Counter()
    sampler_name = None

    def length(self, limit: int | None) -> int | None:
        """Return the number of batches that this process yields in an epoch, at most ``limit``; None if unknown."""
        shares = self.planner.shares
        count = get_length(self.source) if shares is None else shares.batches
        count = None if count is None else -(-count * self._split // self.planner.size)
        return count if limit is None else limit if count is None else min(limit, count)

    def share(self) -> Share:
        """Return the length of this rank's own data."""
        return Share(None, self.counted or 1, get_length(self.source), self.cursor is not None)

    def decide_sharding(self, world: World) -> None:
        """Determine before the first batch, if possible, whether the ranks share a stream. Call it on all ranks."""
        if self.planner.shares is not None:
            self.planner.shares.exchange_lengths(self.share(), world, self._name)
            return
        self.draws.copy_rank_zero(world)
        if isinstance(self.source, list | tuple):
            ends = (len(self.source), self.source[:1], self.source[-1:])
            if len(set(world.gather_objects(digest(ends)))) > 1:
                self.disable_sharding(world)
        elif world.all(split_over(getattr(self.source, "dataset", self.source)) == world.size):
            self.disable_sharding(world)
        else:
            self.compare = world

    def disable_sharding(self, world: World) -> None:
        """Disable sharding, because the stream is already split by rank. Call it on all ranks.

        Raises:
            ValueError: If the batches are split.
        """
        if self._split > 1:
            raise ValueError(
                f"split_batches=True splits each batch over {world.size} processes, but each of them reads its own "
                f"{self._name}. Remove split_batches, and divide batch_size by {world.size}."
            )
        self.compare = None
        self.planner.disable_sharding()
        self.planner.shares.exchange_lengths(self.share(), world, self._name)  # type: ignore[union-attr]

    @property
    def _name(self) -> str:
        return type(getattr(self.source, "dataset", self.source)).__name__

    def items(self, samples: int, batches: int) -> int:
        """Return ``samples``, because the items of a stream are samples; see `ShardedBatches.items`."""
        return samples

    def batches_of(self, items: int) -> int:
        """Return the number of this process's batches that correspond to ``items`` items."""
        size, read, count = self.planner.size, -(-items // (self.counted or 1)), get_length(self.source)
        if count is None or size < self.planner.world_size or self._split > 1:
            return -(-read // self.planner.world_size)
        return -(-count // size) - -(-max(0, count - read) // size)

    def unshuffle(self) -> bool:
        """Return False, because the order of a stream cannot be changed."""
        return False

    def split(self) -> None:
        """Split each batch over the processes, instead of dealing the batches in turn.

        Raises:
            ValueError: If the loader's batches cannot be divided.
        """
        self.counted = split_size(self.counted, self.planner.size, "batches of unknown size")
        self._split = self._collate.pieces = self.planner.size  # type: ignore[union-attr]  # they are counted

    def iterate(self, view: Iterable[Any], limit: int | None) -> Iterator[Any]:
        """Return an iterator over at most ``limit`` of this process's batches; their metadata is in ``micros``.

        The source may draw a seed for its workers. Persistent workers that run already are seeded from the epoch's
        number and RNG state, not by torch.
        """
        self._begin(limit)
        draws, position = self.draws, self.position
        start_state, order = draws.state(), position.order
        is_repeated = order is not None
        if order is None:
            order = {**start_state, "late": position.started}
        else:
            draws.load(order)
        position.begin(order)
        if self.seeded is not None:
            seed = seed_from(order["stream"], position.epoch) if order.get("late") else TORCH_SEEDED
            begin_epoch(self.seeded, seed, self.dataset_epoch)
        self._copy = self._copy_state = None
        loaded, self._loaded_state = self._loaded_state, None
        if loaded is not None:
            self.stateful.load_state_dict(loaded["source"])
        with draws.stream.drawing():
            iterator = iter(view)
        self._copy = CopiedStream(draws.stream)
        self._copy.departures = order.setdefault("departures", {})
        self._repeats = is_repeated and loaded is None
        self._count = 0 if loaded is None else self.start.batches
        if is_repeated:
            draws.stream.go_to(start_state["stream"])
        if loaded is not None and loaded["stream"] is not None:
            self._copy_state = loaded["stream"]
            self.opened()
            draws.load_private(start_state["generators"])
        position.started = getattr(view, "persistent_workers", False)
        return self._read_epoch(iterator, is_repeated, loaded)

    @contextmanager
    def starting(self, persistent: bool) -> Iterator[None]:
        """Return the context in which the iterator and its workers are started.

        A resumed run starts persistent workers from the same RNG state as the interrupted run.
        """
        if not persistent:
            yield
        elif self.position.order is None or not self.position.order.get("late"):
            self.workers = self.draws.read_host_state()
            yield
        else:
            with self.draws.replay_from(self.workers):
                yield

    def opened(self) -> None:
        """Restore the saved state of the source's random stream, now that the loader's iterator exists.

        A user-defined ``__iter__`` may create it, and draw, only when the first batch is requested.
        """
        if self._copy is not None and self._copy_state is not None:
            self._copy.restart(self._copy_state)
            self._copy.depart(self._count // self._split, repeats=True)

    def _read_epoch(self, source: Iterator[Any], is_repeated: bool, loaded: dict[str, Any] | None) -> Iterator[Any]:
        source = avoid_rewind(source)
        has_ended = loaded is not None and loaded["ended"]
        # A source that was saved at its end may start over and yield the next epoch's samples.
        if self.compare is not None and not has_ended:
            self._compare_ranks(source, self.compare)
        if self.planner.shares is not None and not is_repeated:
            self.draws.stream.advance()  # reading advances each rank's reader by a different length
        placeholder = None
        if loaded is None:
            self._compare_first(source)
            placeholder = self._fast_forward(source)
        remaining = 0 if has_ended else self.limit
        shares = self.planner.shares
        yield from (
            self._deal_batches(source, remaining)
            if shares is None
            else self._read_rank_batches(source, remaining, shares, placeholder)
        )

    def _deal_batches(self, source: Iterator[Any], remaining: int | None) -> Iterator[Any]:
        """Yield this process's share of a stream that all ranks read completely."""
        micros = self.micros
        rank, size, number = self.planner.rank, self.planner.size, 0
        while remaining is None or remaining > 0:
            width = self.planner.accumulate(number)
            width, number = width if remaining is None else min(remaining, width), number + 1
            group = self._read(source, width * size)
            # A worker's last batch may be short while other workers have more.
            is_short = len(group) < width * size or group[-1][0] < (self.counted or 1)
            self._supply = _Supply.ENDED if is_short else _Supply.OPEN
            if not group:
                return
            drawn = self._take_drawn()
            rounds = [group[start : start + size] for start in range(0, len(group), size)]
            sizes = [(r[rank][0] if rank < len(r) else 0, sum(count for count, _ in r)) for r in rounds]
            for micro, dealt in zip(self.planner.plan(sizes), rounds, strict=True):
                micros.append((micro, drawn, None))
                yield dealt[min(rank, len(dealt) - 1)][1]
            remaining = None if remaining is None else remaining - len(rounds)

    def _read_rank_batches(
        self, source: Iterator[Any], remaining: int | None, shares: RankShares, placeholder: Any
    ) -> Iterator[Any]:
        first, number = self.start.batches, 0
        while remaining is None or remaining > 0:
            width = self.planner.accumulate(number)
            width, number = width if remaining is None else min(remaining, width), number + 1
            outlook = self._pop_outlook(shares, width)
            group, drawn = self._take_group(source, width, shares)
            if len(group) < width:
                self._supply = _Supply.ENDED
            totals = shares.totals(first, [count for count, _ in group], width, self._name, outlook)
            if not totals:
                return
            placeholder = group[-1][1] if group else placeholder
            if placeholder is None:  # the run resumed at the end of this rank's data
                with self._lend():
                    placeholder = next(iter(self.source))
            group += [(0, placeholder)] * (len(totals) - len(group))
            first, remaining = first + len(totals), None if remaining is None else remaining - len(totals)
            sizes = [(count, total) for (count, _), total in zip(group, totals, strict=True)]
            for micro, (_, batch) in zip(self.planner.plan(sizes), group, strict=True):
                if micro.last and shares.depth:
                    self._look_ahead(source, remaining, shares, number)
                self.micros.append((micro, drawn, None))
                yield batch

    def _take_group(
        self, source: Iterator[Any], width: int, shares: RankShares
    ) -> tuple[list[tuple[int, Any]], Draw | None]:
        if shares.depth:
            self._read_ahead(source, width)
        taken = [self._read_batches.popleft() for _ in range(min(width, len(self._read_batches)))]
        group = [(read.size, read.batch) for read in taken]
        if len(group) < width and self._supply is _Supply.OPEN:
            group += self._read(source, width - len(group))
        drawn = self._take_drawn() if not taken or len(group) > len(taken) else taken[-1].drawn
        if drawn is not None and taken and taken[0].drawn is not None:
            drawn = Draw(taken[0].drawn.before, drawn.after)
        return group, drawn

    def _read_ahead(self, source: Iterator[Any], count: int) -> None:
        while len(self._read_batches) < count and self._supply is _Supply.OPEN:
            state = None if self.stateful is None else self.stateful.state_dict()
            if not (read := self._read(source, 1)):
                self._supply, self._state_at_end = _Supply.READ, state
                return
            self._read_batches.append(BatchAhead(*read[0], state, self._take_drawn()))

    def _look_ahead(self, source: Iterator[Any], remaining: int | None, shares: RankShares, number: int) -> None:
        """Read the group on which the ranks vote during the current step, and set this rank's votes.

        ``number`` is the index of the next group.
        """
        begin, width = 0, 0
        for ahead in range(number, number + shares.depth):
            begin += width
            width = self.planner.accumulate(ahead)
            width = width if remaining is None else min(remaining - begin, width)
        outlook = None
        if width > 0:
            self._read_ahead(source, begin + width)
            sizes = [read.size for read in itertools.islice(self._read_batches, begin, begin + width)]
            outlook = Outlook(width, is_full=sizes == [self.counted or 1] * width, has_ended=not sizes)
        self._outlooks.append(outlook)
        assert self.cursor is not None
        self.cursor.outlook = outlook

    def _pop_outlook(self, shares: RankShares, width: int) -> Outlook | None:
        """Return the votes on the next group; None if no votes apply to it."""
        if self.cursor is not None:
            self.cursor.outlook = None
        if not shares.depth or len(self._outlooks) < shares.depth:
            return None
        outlook = self._outlooks.popleft()
        if outlook is not None and not outlook.has_votes:
            shares.depth = 0
            self._outlooks.clear()
        elif outlook is not None and outlook.width != width:
            self._outlooks = deque([None] * len(self._outlooks))
            return None
        return outlook

    def _compare_ranks(self, source: Iterator[Any], world: World) -> None:
        self.compare = None
        self._pushed.extend(self._read(source, 1))
        nothing = not self._pushed
        first = f"nothing on rank {world.rank}" if nothing else digest(self._pushed[0][1])
        if world.all(nothing):
            return
        if not compare_across_ranks(first, self._name, "batches", world):
            self.disable_sharding(world)
        elif isinstance(self.source, DataLoader):
            kept = f"one in {world.size} batches" if self._split == 1 else "its share of each batch"
            announce(
                f"each of the {world.size} ranks reads all of {self._name} and keeps {kept}. Let each rank read only "
                "its own files or shards: with split_dataset_by_node of Hugging Face's datasets, for a multiple of "
                f"{world.size} shards, split_by_node of webdataset, or files[rank::{world.size}] in __iter__."
            )

    def _compare_first(self, source: Iterator[Any]) -> None:
        """Record a digest of the epoch's first batch; warn if a resumed epoch begins with a different batch."""
        expected, self._expected = self._expected, ""
        self.first_digest = ""
        if isinstance(self.source, list | tuple) or (self.limit == 0 and not self.start.samples):
            return
        if self.stateful is not None and not expected:
            return  # a resume does not read the epoch again
        if not self._pushed:
            self._pushed.extend(self._read(source, 1))
        self.first_digest = digest(self._pushed[0][1]) if self._pushed else ""
        if expected and self.first_digest != expected:
            warn(
                f"the first batch of {self._name} differs from that of the saved epoch, so this resume is not exact, "
                "and samples may be lost or repeated. Seed the stream (shuffle(seed=...)), give it state_dict and "
                "load_state_dict, or resume from the end of an epoch."
            )

    def describe_position(self, drawn: Draw | None) -> dict[str, Any]:
        """Return the position of the source, the state that its workers were started from, and a digest of the epoch.

        ``drawn`` holds the draws made for the last batch. The state after them is returned as the stream's state; with
        None, the current one.
        """
        state = {"source": self._read_state(drawn), "workers": self.workers, "sampler": None, "first_indices": None}
        if self.position.order is None:
            return state
        return {**state, "first_digest": self.first_digest, "pieces": self._split}

    def resume_at(self, state: dict[str, Any]) -> None:
        """Start the next iteration at a position returned by `describe_position`.

        Without a state of the source, the epoch is read again up to the position.
        """
        if state["own"] and state["width"] != self.full and state["order"] is not None:
            skipped = format_count(self.batches_of(state["items"]), "batch")
            warn(
                "the checkpoint was saved within an epoch, with a different world size, and each rank read its own "
                f"stream. Each rank skips {skipped}. The resumed run is exact only if the stream assigns single "
                "samples to the ranks in turn."
            )
        self._loaded_state = state["source"] if self.stateful is not None else None
        # With another number of processes, the first piece of a batch has other samples.
        self._expected = state.get("first_digest", "") if state.get("pieces", 1) == self._split else ""
        self.workers = state["workers"]

    def _read_state(self, drawn: Draw | None) -> dict[str, Any] | None:
        """Return the position of the source; None if it has no state, or if this rank's own stream has ended."""
        if self._loaded_state is not None:  # loaded, but not started since
            return self._loaded_state
        if self.stateful is None or (self._supply is _Supply.ENDED and self.planner.shares is not None):
            return None  # a rank whose stream has ended needs a batch to stay in step
        is_running = self.position.order is not None
        stream = None if not is_running else self.draws.stream.get_state() if drawn is None else drawn.after
        # The state of a source at its end may already be the next epoch's.
        ended = is_running and self._supply is _Supply.ENDED
        if self._read_batches:
            source_state = self._read_batches[0].state
        else:
            source_state = self._state_at_end if self._supply is _Supply.READ else self.stateful.state_dict()
        return {"source": source_state, "stream": stream, "ended": ended}

    def _take_drawn(self) -> Draw | None:
        return self._copy.take() if self.draws_later and self._copy is not None else None

    def _lend(self) -> AbstractContextManager[None]:
        return self._copy.drawing() if self.draws_later and self._copy is not None else nullcontext()

    def _read(self, source: Iterator[Any], count: int) -> list[tuple[int, Any]]:
        pushed = [self._pushed.popleft() for _ in range(min(count, len(self._pushed)))]
        count -= len(pushed)
        if count and self._copy is not None and self._draws_here:
            self._copy.depart(self._count // self._split, repeats=self._repeats)
        with self._lend():
            items = list(itertools.islice(source, count))
        self._count += len(items)
        if self.counted is None:
            return [*pushed, *((1, item) for item in items)]
        if self.planner.world_size == 1:  # nothing is sharded, so a user-defined `__iter__` may yield other batches
            sizes = [self.sizes.popleft() if self.sizes else self.counted for _ in items]
            return [*pushed, *zip(sizes, items, strict=True)]
        if len(items) > len(self.sizes) or (len(items) < count and len(items) < len(self.sizes)):
            raise make_batches_error(self.source)
        return [*pushed, *((self.sizes.popleft(), item) for item in items)]

    def _explain_rereading(self) -> str:
        dataset = getattr(self.source, "dataset", None)
        if self.gap:
            return self.gap
        if get_stateful(dataset) is None:
            return "the stream has no state_dict"
        if self.stateful is None:
            return f"the state of {type(dataset).__name__} is in its workers, where it can't be read"
        return "the checkpoint has no state of the stream"

    def _fast_forward(self, source: Iterator[Any]) -> Any:
        """Read and skip the batches before the position where the run stopped; return the last of them, or None."""
        presharded = self.planner.shares is not None
        passed, batches, batch = 0, 0, None
        skip, done = self.start.samples, self.start.batches
        if skip and not isinstance(self.source, list | tuple):
            samples = format_count(skip, "sample")
            warn(
                f"{self._explain_rereading()}, so {samples} must be read again and skipped to resume where the run "
                "stopped. A dataset with state_dict and load_state_dict resumes immediately. With workers, it "
                "also needs torchdata's StatefulDataLoader."
            )
        with self._lend():
            while (batches < done if presharded else passed < skip) and (read := self._read(source, self._split)):
                passed, batches, batch = passed + sum(size for size, _ in read), batches + 1, read[0][1]
        if presharded and batches < done:
            self._supply = _Supply.ENDED
        if batches:  # the process has followed the reader up to here
            self._take_drawn()
            self._repeats = False
        return batch


def follow_iterator(view: DataLoader[Any], plan: StreamedBatches) -> None:
    """Patch ``view`` to notify ``plan`` when its iterator is created, and to record the sizes that `Counted` adds."""
    weak = weakref.ref(view)  # a cycle would keep persistent workers alive

    def get_iterator() -> Any:
        live_view = weak()
        assert live_view is not None
        with plan.starting(live_view.persistent_workers):
            iterator = note_workers(live_view, type(live_view)._get_iterator(live_view))
        plan.opened()
        return iterator if plan.counted is None else Unwrapped(iterator, plan.pieces, plan.sizes)

    view.__dict__["_get_iterator"] = get_iterator


# -- reading ahead of the loop -----------------------------------------------------------------------------------------

# For example the network of an agent of a source of experience of a dataset; a pipeline's list is a level too.
_LEVELS = 5
_OBJECTS = 1000
_ITEMS = 100  # a longer list is treated as data


def may_read_ahead(source: DataLoader[Any], state_owner: Any) -> bool:
    """Return whether a stream may be read ahead of the loop.

    A stream that is read in this process may not be read ahead if its samples could depend on the model being trained.
    The same holds for a stream whose ``state_dict`` could be too expensive to call before each batch, or could return
    an object that changes later.
    """
    owners = [state_owner]
    if source.num_workers == 0:
        if holds_model(source.dataset):
            return False
        owners.append(get_stateful(source.dataset))  # a loader with a state asks the dataset for its state
    return all(owner is None or copies_state(owner) for owner in owners)


def holds_model(dataset: Any) -> bool:
    """Return whether a dataset refers to an ``nn.Module``, directly or through nested objects and functions.

    References are followed only to a limited depth and number.
    """
    visited, level = set[int](), [dataset, getattr(type(dataset), "__iter__", None)]
    for _ in range(_LEVELS):
        following: list[Any] = []
        for value in level:
            if isinstance(value, nn.Module):
                return True
            if id(value) not in visited and len(visited) < _OBJECTS:
                visited.add(id(value))
                following += _iter_held(value)
        level = following
    return any(isinstance(value, nn.Module) for value in level)


def _iter_held(value: Any) -> Iterator[Any]:
    if isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, partial):
        yield value.func
        yield from value.args
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # it is not filled yet
                yield cell.cell_contents
        yield from (value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__)
    elif isinstance(value, list | tuple | dict):
        if len(value) <= _ITEMS:
            yield from value.values() if isinstance(value, dict) else value
    elif not isinstance(value, type | ModuleType):
        yield from getattr(value, "__dict__", {}).values()
