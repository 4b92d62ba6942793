"""Batches from a source that can not be indexed: an IterableDataset, a generator, any iterable of batches."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.utils.data import DataLoader

from ..strategies import warn
from .draws import Draws, stateful
from .order import GroupPlanner, Micro, sized
from .random_state import RandomStream, State, seed_from
from .reading import LEFT_AS_IT_IS, SeededStream, seed_epoch


class Counted:
    """A collate function that also says how many samples it was given. Works in worker processes."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> tuple[int, Any]:
        return len(samples), self.collate(samples)


def other_batches(source: Any) -> ValueError:
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


class StreamedBatches:
    """Deals the batches of one stream to the processes in turn, in groups with exact weights.

    Every process reads the whole stream, as nothing is known of it; the r-th of each ``size`` batches is process r's.
    The last, short round is dealt as it is, and a process without a batch of its own takes part with weight zero.

    Args:
        source: the user's loader or iterable.
        counted: the samples of a full batch, where ``sizes`` has those of each; None where batches weigh the same.
        planner: groups and weights.
        draws: what the source may draw from.
        lent: whether this process reads the source itself, so that the stream has to be lent to it: then what it
            draws is the same on every process, and the same again after a resume.
        stateful: an object with ``state_dict`` and ``load_state_dict`` that knows where the source is, or None.

    Attributes:
        order: what the epoch was drawn from; where it is set before the epoch begins, that epoch comes again.
        micros: the facts of the batches that were yielded and not yet taken by the loop.
        sizes: the samples in batches that the source has made and not yet yielded.
    """

    def __init__(
        self, source: Any, counted: int | None, planner: GroupPlanner, draws: Draws, lent: bool, stateful: Any
    ) -> None:
        self.source = source
        self.counted = counted
        self.planner = planner
        self.draws = draws
        self.lent = lent
        self.stateful = stateful
        self.order: dict[str, Any] | None = None
        self._stands: dict[str, Any] | None = None
        self._reader: RandomStream | None = None
        self._late: State | None = None  # where the reader is once the source is open again
        self._ended = False
        self.seeded: SeededStream | None = None  # the dataset, where its workers outlive an epoch
        self.workers: dict[str, Any] | None = None  # what they were started from
        self.sizes: deque[int] = deque()
        self.begin(0, 0, None)

    def begin(self, epoch: int, skip: int, limit: int | None) -> None:
        """Say what the next iteration is: its epoch, the samples to pass over, and the most batches to yield."""
        self.epoch, self.skip, self.limit = epoch, skip, limit
        self.sizes.clear()
        self.micros: deque[tuple[Micro, State | None]] = deque()

    @property
    def width(self) -> int:
        """Samples in a full batch, over all processes; batches, where their samples are not known."""
        return (self.counted or 1) * self.planner.size

    full = width
    left_out = 0

    def length(self, limit: int | None) -> int | None:
        """Batches this process yields in a whole epoch, no more than ``limit``; None where that is not known."""
        count = sized(self.source)
        if count is None:
            return limit
        count = -(-count // self.planner.size)
        return count if limit is None else min(limit, count)

    def items(self, samples: int, batches: int) -> int:
        """See `ShardedBatches.items`; here samples are all that counts."""
        return samples

    def batches_of(self, items: int) -> int:
        """Batches of this process that ``items`` stand for: with those to come, an epoch's."""
        size, read, count = self.planner.size, -(-items // (self.counted or 1)), sized(self.source)
        if count is None:
            return -(-read // size)
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
        now = draws.state()
        again = self.order is not None
        if self.order is None:
            self.order = {**now, "late": silently}
        else:
            draws.load(self.order)
        if self.seeded is not None:
            late = self.order.get("late", False)
            seed_epoch(self.seeded, seed_from(self.order["stream"], self.epoch) if late else LEFT_AS_IT_IS)
        self._reader = self._late = None
        if self._stands is not None:
            self.stateful.load_state_dict(self._stands["source"])
        with draws.stream.drawing():
            iterator = get_iterator()
        # Read ahead of the run's stream, which follows the batches that are really taken.
        self._reader = RandomStream(draws.stream.state)
        if again:
            draws.stream.go_to(now["stream"])
        if self._stands is not None and self._stands["stream"] is not None:
            self._late = self._stands["stream"]
            self.started()
            draws.load_private(now["generators"])
        return iterator

    @contextmanager
    def starting(self, persistent: bool) -> Iterator[None]:
        """Around the start of the iterator, with which workers are started too.

        Those that persist draw their seed once in a run, and have it again where a run goes on.
        """
        if not persistent:
            yield
        elif self.order is None or not self.order.get("late", False):
            self.workers = self.draws.here()
            yield
        else:
            with self.draws.gone_to(self.workers):
                yield

    def started(self) -> None:
        """The loader's own iterator is made, which draws; where a subclass makes it with the first batch, only now."""
        if self._reader is not None and self._late is not None:
            self._reader.go_to(self._late)

    def batches(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yield this process's micro-batches; their facts are in ``micros``."""
        micros = self.micros
        rank, size = self.planner.rank, self.planner.size
        stands, self._stands = self._stands, None
        if stands is None:
            self._fast_forward(source)
        left = 0 if stands is not None and stands["ended"] else self.limit
        while left is None or left > 0:
            width = self.planner.accumulate() if left is None else min(left, self.planner.accumulate())
            group = self._read(source, width * size)
            self._ended = len(group) < width * size or group[-1][0] < (self.counted or 1)
            if not group:
                return
            drawn = self._reader.state if self.lent and self._reader is not None else None
            rounds = [group[start : start + size] for start in range(0, len(group), size)]
            sizes = [(r[rank][0] if rank < len(r) else 0, sum(count for count, _ in r)) for r in rounds]
            for micro, dealt in zip(self.planner.plan(sizes), rounds, strict=True):
                micros.append((micro, drawn))
                yield dealt[min(rank, len(dealt) - 1)][1]
            left = None if left is None else left - len(rounds)

    def state(self, drawn: Any) -> dict[str, Any] | None:
        """Where the source stands, if it can say: between two groups nothing has been read ahead of the loop."""
        if self.stateful is None:
            return None
        stream = None if self.order is None else drawn or self.draws.stream.now()
        # A source whose end was met may say already that it begins anew.
        ended = self.order is not None and self._ended
        return {"source": self.stateful.state_dict(), "stream": stream, "ended": ended}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Let the next iteration begin where `state` was taken; None leaves it to reading and passing over."""
        self._stands = state if self.stateful is not None else None

    def _lend(self) -> AbstractContextManager[None]:
        return self._reader.drawing() if self.lent and self._reader is not None else nullcontext()

    def _read(self, source: Iterator[Any], count: int) -> list[tuple[int, Any]]:
        with self._lend():
            items = list(itertools.islice(source, count))
        if self.counted is None:
            return [(1, item) for item in items]
        if len(items) > len(self.sizes) or (len(items) < count and len(items) < len(self.sizes)):
            raise other_batches(self.source)
        return [(self.sizes.popleft(), item) for item in items]

    def _why_again(self) -> str:
        dataset = getattr(self.source, "dataset", None)
        if stateful(dataset) is None:
            return "the stream has no state of its own"
        if self.stateful is None:
            return f"the state of {type(dataset).__name__} is in its workers, where it can't be asked for"
        return "the checkpoint has no state of the stream"

    def _fast_forward(self, source: Iterator[Any]) -> None:
        passed = 0
        if self.skip and not isinstance(self.source, list | tuple):
            warn(
                f"{self._why_again()}, so {self.skip} samples are read again and passed over to resume where the run "
                "stopped. A dataset with state_dict/load_state_dict resumes at once without workers, a loader with "
                "them always."
            )
        with self._lend():
            while passed < self.skip and (read := self._read(source, 1)):
                passed += read[0][0]


def follow_iterator(view: DataLoader[Any], plan: StreamedBatches) -> None:
    """Be there when ``view``'s own ``__iter__`` makes its iterator, and let end there the sizes that `Counted` adds."""
    weak = weakref.ref(view)  # a cycle would keep persistent workers alive

    def get_iterator() -> Any:
        own_view = weak()
        assert own_view is not None
        with plan.starting(own_view.persistent_workers):
            iterator = type(own_view)._get_iterator(own_view)
        plan.started()
        return iterator if plan.counted is None else Unwrapped(iterator, plan.sizes)

    view.__dict__["_get_iterator"] = get_iterator
