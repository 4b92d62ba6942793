"""Batches from a source that can not be indexed: an IterableDataset, a generator, any iterable of batches."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from ...common.messages import announce, warn
from ...strategies import World
from ..rng import Draw, RandomStream, State, seed_from
from .batch_digest import digest
from .micro_batches import Cursor, GroupPlanner, Micro, avoid_rewind
from .rank_shares import RankShares, Share, compare_across_ranks
from .sampler_rng import Draws, get_stateful
from .sharded_sampler import get_length
from .source_libraries import explain_split, split_over
from .stream_end import Outlook
from .workers import TORCH_SEEDED, SeededStream, note_workers, seed_epoch


class Counted:
    """A collate function that also says how many samples it was given. Works in worker processes."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> tuple[int, Any]:
        return len(samples), self.collate(samples)


def format_ordinal(number: int) -> str:
    """Return ``"2nd"``, ``"3rd"``, ``"4th"`` ..."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def make_batches_error(source: Any) -> ValueError:
    """What is wrong with a loader whose own ``__iter__`` yields fewer or more batches than it was given."""
    return ValueError(
        f"{type(source).__name__} does not yield one batch for each that is read for it, so it can be neither sharded "
        "nor resumed. Let its __iter__ yield what super().__iter__() yields, one for one, or pass an iterable of "
        "batches: prepare_data_loader(iter(loader))."
    )


class Unwrapped:
    """A loader's iterator without the sizes that `Counted` adds, which it notes: a subclass sees plain batches.

    Args:
        iterator: yields ``(samples, batch)``.
        sizes: where to note the samples.
    """

    def __init__(self, iterator: Iterator[Any], sizes: deque[int]) -> None:
        self.iterator = iterator
        self.sizes = sizes

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        size, batch = next(self.iterator)
        self.sizes.append(size)
        return batch

    def __getattr__(self, name: str) -> Any:  # a DataLoader resets the iterator of its persistent workers
        if name == "iterator":
            raise AttributeError(name)
        return getattr(self.iterator, name)


@dataclass(slots=True, frozen=True)
class BatchAhead:
    """A batch that was read ahead of the loop.

    Attributes:
        size: its samples.
        batch: what the source yielded.
        state: where the source was before it was read; None of a source that cannot say.
        drawn: what was drawn to read it; None where this process draws nothing.
    """

    size: int
    batch: Any
    state: Any
    drawn: Draw | None


class StreamedBatches:
    """Reads the batches of a stream, in groups with exact weights.

    A stream that splits itself by rank (it looks at the rank, or a library has split it) is read as it is: each rank
    trains on what its own stream yields. One stream that is the same on all ranks is dealt: every rank reads all of it
    and the r-th of each ``size`` batches is rank r's. Which of the two it is, the first batches tell: they are compared
    over the ranks.

    A rank without a batch in a round takes part with weight zero.

    A stream that splits itself by rank may be read ahead of the loop by a group of micro-batches or two, so that the
    ranks can vote on its end beside their gradients; see `RankShares`.

    Args:
        source: the user's loader or iterable.
        counted: the samples of a full batch, where ``sizes`` has those of each; None where batches weigh the same.
        planner: groups and weights.
        draws: what the source may draw from.
        lent: whether this process reads the source itself, so that the stream has to be lent to it: then what it
            draws is the same on every rank, and the same again after a resume.
        stateful: an object with ``state_dict`` and ``load_state_dict`` that knows where the source is, or None.
        gap: why a state that the source has is not asked for, or "".
        cursor: where to say what the votes of a group of micro-batches are to tell of a coming one; None of a stream
            that may not be read ahead of the loop.

    Attributes:
        order: what the epoch was drawn from; where it is set before the epoch begins, that epoch comes again.
        micros: the facts of the batches that were yielded and not yet taken by the loop.
        sizes: the samples in batches that the source has made and not yet yielded.
        compare: the ranks whose first batches are still to be compared, or None.
        first_digest: of the running epoch's first batch, to see that a resume reads the same ones; "" where it is not
            read again.
    """

    def __init__(
        self,
        source: Any,
        counted: int | None,
        planner: GroupPlanner,
        draws: Draws,
        lent: bool,
        stateful: Any,
        gap: str = "",
        cursor: Cursor | None = None,
    ) -> None:
        self.gap = gap
        self.cursor = cursor
        self.compare: World | None = None
        self.first_digest = ""
        self._expected = ""  # the digest of the epoch that is resumed
        self._pushed: deque[tuple[int, Any]] = deque()  # read to be compared
        self._again = False
        self.source = source
        self.counted = counted
        self.planner = planner
        self.draws = draws
        self.lent = lent
        self.stateful = stateful
        self.order: dict[str, Any] | None = None
        self._stands: dict[str, Any] | None = None
        self._reader: RandomStream | None = None
        self._taken: State | None = None  # where the reader was when the batches yielded last were read
        self._late: State | None = None  # where the reader is once the source is open again
        self._ended = False
        self.seeded: SeededStream | None = None  # the dataset, where its workers outlive an epoch
        self.workers: dict[str, Any] | None = None  # what they were started from
        self.sizes: deque[int] = deque()
        self._ahead: deque[BatchAhead] = deque()
        self._outlooks: deque[Outlook | None] = deque()  # of the groups to come, the next one first
        self.begin(0, 0, None)

    def begin(self, epoch: int, skip: int, limit: int | None, done: int = 0) -> None:
        """Set what the next iteration is; see `ShardedBatches.begin`."""
        self.epoch, self.skip, self.limit, self.done = epoch, skip, limit, done
        self.sizes.clear()
        self._pushed.clear()
        self._ahead.clear()
        self._outlooks.clear()
        self._is_exhausted = False  # the source's end was met while reading ahead
        self._state_at_end: Any = None  # of the source, before that
        self.micros: deque[tuple[Micro, Draw | None, None]] = deque()

    @property
    def full(self) -> int:
        """Samples in a full batch, over all ranks; batches, where their samples are not known."""
        return (self.counted or 1) * self.planner.world_size

    left_out = 0

    def length(self, limit: int | None) -> int | None:
        """Batches this process yields in a whole epoch, no more than ``limit``; None where that is not known."""
        shares = self.planner.shares
        if shares is not None:
            count = shares.batches
        else:
            count = get_length(self.source)
            count = None if count is None else -(-count // self.planner.size)
        return count if limit is None else limit if count is None else min(limit, count)

    def share(self) -> Share:
        """How long this rank's own data is; where batches hold unknown numbers of samples, batches weigh the same."""
        return Share(None, self.counted or 1, get_length(self.source), self.cursor is not None)

    def agree(self, world: World) -> None:
        """Find out what the ranks read, as far as that is known before the first batch. All ranks must ask."""
        if self.planner.shares is not None:
            self.planner.shares.agree(self.share(), world, self._name)
            return
        self.draws.agree(world)
        if isinstance(self.source, list | tuple):
            ends = (len(self.source), self.source[:1], self.source[-1:])
            if len(set(world.gather_objects(digest(ends)))) > 1:
                self.disable_sharding(world)
        elif world.all(split_over(getattr(self.source, "dataset", self.source)) == world.size):
            self.disable_sharding(world)
        else:
            self.compare = world

    def disable_sharding(self, world: World) -> None:
        """Deal nothing: the stream is split by rank already. All ranks must ask."""
        self.compare = None
        self.planner.disable_sharding()
        self.planner.shares.agree(self.share(), world, self._name)  # type: ignore[union-attr]

    @property
    def _name(self) -> str:
        return type(getattr(self.source, "dataset", self.source)).__name__

    def items(self, samples: int, batches: int) -> int:
        """See `ShardedBatches.items`; here samples are all that counts."""
        return samples

    def batches_of(self, items: int) -> int:
        """Batches of this process that ``items`` stand for: with those to come, an epoch's."""
        size, read, count = self.planner.size, -(-items // (self.counted or 1)), get_length(self.source)
        if count is None or size < self.planner.world_size:
            return -(-read // self.planner.world_size)
        return -(-count // size) - -(-max(0, count - read) // size)

    @property
    def draws_later(self) -> bool:
        """See `ShardedBatches.draws_later`."""
        return self.lent

    def unshuffle(self) -> bool:
        """Nothing is known of how a stream comes by its order. See `ShardedBatches.unshuffle`."""
        return False

    def split(self) -> None:
        """Refused: what a stream yields is dealt whole.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "split_batches=True needs a dataset that can be indexed: the batches of a stream are dealt whole, one to "
            "each process. Divide batch_size by the number of processes instead."
        )

    def start(self, get_iterator: Callable[[], Iterator[Any]], silently: bool) -> Iterator[Any]:
        """Start the source's iterator, which may draw a seed for its workers; see `ShardedBatches.start`."""
        draws = self.draws
        start_state = draws.state()
        again = self._again = self.order is not None
        if self.order is None:
            self.order = {**start_state, "late": silently}
        else:
            draws.load(self.order)
        if self.seeded is not None:
            late = self.order.get("late", False)
            seed_epoch(self.seeded, seed_from(self.order["stream"], self.epoch) if late else TORCH_SEEDED)
        self._reader = self._late = None
        if self._stands is not None:
            self.stateful.load_state_dict(self._stands["source"])
        with draws.stream.drawing():
            iterator = get_iterator()
        # Read ahead of the run's stream, which follows the batches that are really taken.
        self._reader = RandomStream(draws.stream.get_state())
        self._taken = self._reader.state
        if again:
            draws.stream.go_to(start_state["stream"])
        if self._stands is not None and self._stands["stream"] is not None:
            self._late = self._stands["stream"]
            self.started()
            draws.load_private(start_state["generators"])
        return iterator

    @contextmanager
    def starting(self, persistent: bool) -> Iterator[None]:
        """Around the start of the iterator, with which workers are started too.

        Those that persist draw their seed once in a run, and have it again where a run goes on.
        """
        if not persistent:
            yield
        elif self.order is None or not self.order.get("late", False):
            self.workers = self.draws.read_host_state()
            yield
        else:
            with self.draws.replay_from(self.workers):
                yield

    def started(self) -> None:
        """The loader's own iterator is made, which draws; where a subclass makes it with the first batch, only now."""
        if self._reader is not None and self._late is not None:
            self._reader.go_to(self._late)
            self._taken = self._late

    def batches(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yield this process's micro-batches; their facts are in ``micros``."""
        source = avoid_rewind(source)
        stands, self._stands = self._stands, None
        self._ended = False
        has_ended = stands is not None and stands["ended"]
        # A source that was saved at its end may begin anew: what it yields now is the next epoch's.
        if self.compare is not None and not has_ended:
            self._compare_ranks(source, self.compare)
        if self.planner.shares is not None and not self._again:
            self.draws.stream.advance()  # what is read moves each rank's reader by another length
        stand_in = None
        if stands is None:
            self._compare_first(source)
            stand_in = self._fast_forward(source)
        left = 0 if has_ended else self.limit
        shares = self.planner.shares
        yield from (
            self._deal_batches(source, left)
            if shares is None
            else self._read_rank_batches(source, left, shares, stand_in)
        )

    def _deal_batches(self, source: Iterator[Any], left: int | None) -> Iterator[Any]:
        """One stream, which all ranks read."""
        micros = self.micros
        rank, size = self.planner.rank, self.planner.size
        while left is None or left > 0:
            width = self.planner.accumulate() if left is None else min(left, self.planner.accumulate())
            group = self._read(source, width * size)
            self._ended = len(group) < width * size or group[-1][0] < (self.counted or 1)
            if not group:
                return
            drawn = self._take_drawn()
            rounds = [group[start : start + size] for start in range(0, len(group), size)]
            sizes = [(r[rank][0] if rank < len(r) else 0, sum(count for count, _ in r)) for r in rounds]
            for micro, dealt in zip(self.planner.plan(sizes), rounds, strict=True):
                micros.append((micro, drawn, None))
                yield dealt[min(rank, len(dealt) - 1)][1]
            left = None if left is None else left - len(rounds)

    def _read_rank_batches(
        self, source: Iterator[Any], left: int | None, shares: RankShares, stand_in: Any
    ) -> Iterator[Any]:
        """A stream of this rank's own, until all ranks have read theirs."""
        first = self.done
        while left is None or left > 0:
            width = self.planner.accumulate() if left is None else min(left, self.planner.accumulate())
            outlook = self._pop_outlook(shares, width)
            group, drawn = self._take_group(source, width, shares)
            self._ended = self._ended or len(group) < width
            totals = shares.totals(first, [count for count, _ in group], width, self._name, outlook)
            if not totals:
                return
            stand_in = group[-1][1] if group else stand_in
            if stand_in is None:  # resumed just behind the end of this rank's data
                with self._lend():
                    stand_in = next(iter(self.source))
            group += [(0, stand_in)] * (len(totals) - len(group))
            first, left = first + len(totals), None if left is None else left - len(totals)
            sizes = [(count, total) for (count, _), total in zip(group, totals, strict=True)]
            for micro, (_, batch) in zip(self.planner.plan(sizes), group, strict=True):
                if micro.last and shares.depth:
                    self._look_ahead(source, left, shares)
                self.micros.append((micro, drawn, None))
                yield batch

    def _take_group(
        self, source: Iterator[Any], width: int, shares: RankShares
    ) -> tuple[list[tuple[int, Any]], Draw | None]:
        """Return the next group of micro-batches, fewer where the stream ends, and what was drawn to read them."""
        if shares.depth:
            self._read_ahead(source, width)
        taken = [self._ahead.popleft() for _ in range(min(width, len(self._ahead)))]
        group = [(read.size, read.batch) for read in taken]
        if len(group) < width and not (self._ended or self._is_exhausted):
            group += self._read(source, width - len(group))
        drawn = self._take_drawn() if not taken or len(group) > len(taken) else taken[-1].drawn
        if drawn is not None and taken and taken[0].drawn is not None:
            drawn = Draw(taken[0].drawn.before, drawn.after)
        return group, drawn

    def _read_ahead(self, source: Iterator[Any], count: int) -> None:
        """Read until ``count`` batches lie ahead of the loop, or the stream ends."""
        while len(self._ahead) < count and not (self._ended or self._is_exhausted):
            state = None if self.stateful is None else self.stateful.state_dict()
            if not (read := self._read(source, 1)):
                self._is_exhausted, self._state_at_end = True, state
                return
            self._ahead.append(BatchAhead(*read[0], state, self._take_drawn()))

    def _look_ahead(self, source: Iterator[Any], left: int | None, shares: RankShares) -> None:
        """Read the group that the votes of the current one are to tell of, and say what this rank knows of it."""
        begin, width = 0, 0
        for _ in range(shares.depth):
            begin += width
            width = self.planner.accumulate() if left is None else min(left - begin, self.planner.accumulate())
        outlook = None
        if width > 0:
            self._read_ahead(source, begin + width)
            sizes = [read.size for read in itertools.islice(self._ahead, begin, begin + width)]
            outlook = Outlook(width, is_full=sizes == [self.counted or 1] * width, has_ended=not sizes)
        self._outlooks.append(outlook)
        assert self.cursor is not None
        self.cursor.outlook = outlook

    def _pop_outlook(self, shares: RankShares, width: int) -> Outlook | None:
        """Return what the ranks voted on the group that comes next; None where they did not.

        A loop whose backward carries no votes answers none. Then reading ahead is given up, on all ranks alike.
        Where the group is wider or narrower than was expected, it and those after it are other ones than were voted on.
        """
        if self.cursor is not None:
            self.cursor.outlook = None
        if not shares.depth or len(self._outlooks) < shares.depth:
            return None
        outlook = self._outlooks.popleft()
        if outlook is not None and not outlook.is_settled:
            shares.depth = 0
            self._outlooks.clear()
        elif outlook is not None and outlook.width != width:
            self._outlooks = deque([None] * len(self._outlooks))
            return None
        return outlook

    def _compare_ranks(self, source: Iterator[Any], world: World) -> None:
        """Find out whether the ranks read one stream, or each one of its own: compare their first batches.

        Raises:
            ValueError: on every rank, if some ranks read the same stream and others another one.
        """
        self.compare = None
        self._pushed.extend(self._read(source, 1))
        nothing = not self._pushed
        first = f"nothing on rank {world.rank}" if nothing else digest(self._pushed[0][1])
        if world.all(nothing):
            return
        if not compare_across_ranks(first, self._name, "batches", world):
            self.disable_sharding(world)
        elif isinstance(self.source, DataLoader):
            announce(
                f"all {world.size} ranks read the whole of {self._name} and keep every {format_ordinal(world.size)} "
                f"batch. {explain_split(self.source.dataset, world.size)}"
            )

    def _compare_first(self, source: Iterator[Any]) -> None:
        """Note what the epoch begins with; warn if a resumed epoch does not begin with it again."""
        expected, self._expected = self._expected, ""
        self.first_digest = ""
        if isinstance(self.source, list | tuple) or (self.limit == 0 and not self.skip):
            return
        if self.stateful is not None and not expected:
            return  # a resume does not read the epoch again
        if not self._pushed:
            self._pushed.extend(self._read(source, 1))
        self.first_digest = digest(self._pushed[0][1]) if self._pushed else ""
        if expected and self.first_digest != expected:
            warn(
                f"{self._name} does not begin with the batches that the checkpoint's epoch began with, so this resume "
                "is not exact: samples may be lost or repeated. Seed what the stream draws from (shuffle(seed=...)), "
                "give it state_dict and load_state_dict, or resume from the end of an epoch."
            )

    def state(self, drawn: Draw | None) -> dict[str, Any] | None:
        """Where the source stands, if it can say: between two groups nothing has been read ahead of the loop."""
        if self._stands is not None:  # loaded, and not begun since
            return self._stands
        if self.stateful is None or (self._ended and self.planner.shares is not None):
            return None  # a rank whose own stream has ended needs a batch of it to stay in step
        stream = None if self.order is None else self.draws.stream.get_state() if drawn is None else drawn.after
        # A source whose end was met may say already that it begins anew.
        ended = self.order is not None and self._ended
        if self._ahead:
            source_state = self._ahead[0].state
        else:
            source_state = self._state_at_end if self._is_exhausted else self.stateful.state_dict()
        return {"source": source_state, "stream": stream, "ended": ended}

    def load_state(self, state: dict[str, Any] | None, first_digest: str = "") -> None:
        """Let the next iteration begin where `state` was taken; None leaves it to reading and passing over.

        Args:
            state: of the source, or None.
            first_digest: of the first batch of the epoch that is resumed, where it is known.
        """
        self._stands = state if self.stateful is not None else None
        self._expected = first_digest

    def _take_drawn(self) -> Draw | None:
        """Return what the reader drew since the last call; None where this process draws nothing."""
        if not self.lent or self._reader is None:
            return None
        before, self._taken = self._taken, self._reader.state
        assert before is not None
        return Draw(before, self._taken)

    def _lend(self) -> AbstractContextManager[None]:
        return self._reader.drawing() if self.lent and self._reader is not None else nullcontext()

    def _read(self, source: Iterator[Any], count: int) -> list[tuple[int, Any]]:
        pushed = [self._pushed.popleft() for _ in range(min(count, len(self._pushed)))]
        count -= len(pushed)
        with self._lend():
            items = list(itertools.islice(source, count))
        if self.counted is None:
            return [*pushed, *((1, item) for item in items)]
        if len(items) > len(self.sizes) or (len(items) < count and len(items) < len(self.sizes)):
            raise make_batches_error(self.source)
        return [*pushed, *((self.sizes.popleft(), item) for item in items)]

    def _explain_rereading(self) -> str:
        dataset = getattr(self.source, "dataset", None)
        if self.gap:
            return self.gap
        if get_stateful(dataset) is None:
            return "the stream has no state of its own"
        if self.stateful is None:
            return f"the state of {type(dataset).__name__} is in its workers, where it can't be asked for"
        return "the checkpoint has no state of the stream"

    def _fast_forward(self, source: Iterator[Any]) -> Any:
        """Read up to where the run stopped; returns the last batch, or None."""
        presharded = self.planner.shares is not None
        passed, batches, batch = 0, 0, None
        if self.skip and not isinstance(self.source, list | tuple):
            warn(
                f"{self._explain_rereading()}, so {self.skip} samples are read again and passed over to resume where "
                "the run stopped. A dataset with state_dict and load_state_dict resumes at once without workers, and "
                "with them in torchdata's StatefulDataLoader."
            )
        with self._lend():
            while (batches < self.done if presharded else passed < self.skip) and (read := self._read(source, 1)):
                passed, batches, batch = passed + read[0][0], batches + 1, read[0][1]
        self._ended = presharded and batches < self.done
        if batches:  # the process has followed the reader up to here
            self._take_drawn()
        return batch


def follow_iterator(view: DataLoader[Any], plan: StreamedBatches) -> None:
    """Be there when ``view``'s own ``__iter__`` makes its iterator, and let end there the sizes that `Counted` adds."""
    weak = weakref.ref(view)  # a cycle would keep persistent workers alive

    def get_iterator() -> Any:
        live_view = weak()
        assert live_view is not None
        with plan.starting(live_view.persistent_workers):
            iterator = note_workers(live_view, type(live_view)._get_iterator(live_view))
        plan.started()
        return iterator if plan.counted is None else Unwrapped(iterator, plan.sizes)

    view.__dict__["_get_iterator"] = get_iterator
