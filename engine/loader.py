"""The user's loader, sharded exactly, grouped into optimizer steps, and able to say and resume where it is."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ..strategies import World
from .draws import Draws
from .fingerprint import check_same_data
from .order import GroupPlanner, Micro, ShardedBatches, sized
from .random_state import RandomStream, State
from .reading import SeededSamples, read_here
from .stream import Counted, StreamedBatches, Unwrapped, other_batches


class Cursor:
    """Where the loop is: the micro-batch that was yielded last. Shared by an Accelerator and its loaders."""

    __slots__ = ("micro",)

    def __init__(self) -> None:
        self.micro: Micro | None = None


class Loader:
    """A loader prepared for this process.

    The user's loader is never changed or rebuilt: a shallow copy of it (same class, same settings) runs with our batch
    sampler, which replays theirs and keeps this process's part.

    Args:
        source: a ``DataLoader`` (any subclass), or any iterable of batches.
        world: the processes to share the data.
        cursor: told of each micro-batch that is yielded.
        stream: what the samplers draw from.
        accumulate: micro-batches per optimizer step.
        shard: False leaves each process with all that its own loader yields.
        evaluation: no groups, and the tail is dealt so that every process takes part in every batch.
        move: applied to each batch (device transfer), or None.
        split: ``batch_size`` is that of the global batch.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        world: World,
        cursor: Cursor,
        stream: RandomStream,
        accumulate: Callable[[], int],
        shard: bool = True,
        evaluation: bool = False,
        move: Callable[[Any], Any] | None = None,
        split: bool = False,
    ) -> None:
        if not isinstance(source, Iterable) and not hasattr(source, "__getitem__"):
            raise TypeError(
                f"a loader must be a DataLoader or another iterable of batches, not {type(source).__name__}: {source!r}"
            )
        self.source = source
        self.move = move
        self.evaluation = evaluation
        self.epoch = 0
        self.samples = 0  # of this epoch, over all processes
        self.batches = 0  # of this epoch, of this process
        self.limit: int | None = None
        self._cursor = cursor
        self._stream = stream
        self._micro: Micro | None = None  # the last one of this epoch
        self._drawn: State | None = None  # where the order's stream stood then
        self._resuming = False
        self._passing = 0  # batches that the coming epoch begins without
        self._started = False  # the view's persistent workers, in this process or in the one it goes on from
        rank, size = (world.rank, world.size) if shard and not shards_itself(source) else (0, 1)
        planner = GroupPlanner(rank, size, (lambda: 1) if evaluation else accumulate)
        self._plan: ShardedBatches | StreamedBatches
        self._view: Any = source
        if isinstance(source, DataLoader):
            self._prepare_view(source, planner, evaluation)
        else:
            # A list draws nothing, so nothing has to be lent to it.
            lent = not isinstance(source, list | tuple)
            self._plan = StreamedBatches(source, None, planner, Draws(stream, source), lent, _stateful(source))
        if split and size > 1:
            self._plan.split()

    def _prepare_view(self, source: DataLoader[Any], planner: GroupPlanner, evaluation: bool) -> None:
        if not getattr(source, "in_order", True):
            raise ValueError(
                "DataLoader(in_order=False) yields batches in the order its workers finish, so no run could be "
                "repeated or resumed. Use in_order=True."
            )
        view = self._view = copy.copy(source)
        settings = view.__dict__  # DataLoader forbids to set these by name once it is built
        settings["_iterator"] = None
        workers = source.num_workers > 0
        if isinstance(source.dataset, IterableDataset):
            counted = source.batch_size
            if counted is not None:
                settings["collate_fn"] = Counted(source.collate_fn)
            draws = Draws(self._stream, source, None if workers else source.dataset)
            # A subclass's own __iter__ may draw the workers' seed late, or anything else.
            lent = not workers or type(source).__iter__ is not DataLoader.__iter__
            # A loader that knows where it is knows it of its workers too.
            stateful = _stateful(view)
            if stateful is None and not workers:
                stateful = _stateful(source.dataset)
            streamed = self._plan = StreamedBatches(source, counted, planner, draws, lent, stateful)
            if counted is not None:
                _unwrap(view, streamed)
            return
        plan = self._plan = ShardedBatches(source, planner, self._stream, evaluation, positions=workers)
        settings["batch_sampler" if source.batch_sampler is not None else "sampler"] = plan
        if workers:
            settings["dataset"] = SeededSamples(source.dataset)
        # Not around `iter(view)`: a subclass whose __iter__ is a generator starts the workers later, from within.
        # Weak, as a cycle would keep persistent workers alive.
        weak_view, weak_self = weakref.ref(view), weakref.ref(self)
        start: Callable[[DataLoader[Any]], Iterator[Any]] = type(view)._get_iterator
        if start is DataLoader._get_iterator and not workers and not source.pin_memory:
            start = read_here

        def get_iterator() -> Any:
            own_view, loader = weak_view(), weak_self()
            assert own_view is not None
            assert loader is not None
            silently, loader._started = loader._started, source.persistent_workers
            return plan.start(lambda: start(own_view), silently)

        settings["_get_iterator"] = get_iterator

    # -- iteration -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield this process's micro-batches of one epoch; each is announced to the cursor first."""
        batches = self._begin()
        micros = self._plan.micros
        cursor, stream, move = self._cursor, self._stream, self.move
        outer = cursor.micro  # of a loop around this one, such as training around a validation
        micro: Micro | None = None
        try:
            for batch in batches:
                if not micros:
                    raise other_batches(self.source)
                micro, drawn = micros.popleft()
                cursor.micro = self._micro = micro
                self.samples += micro.everyone
                self.batches += 1
                if drawn is not None:
                    stream.state = self._drawn = drawn
                yield batch if move is None else move(batch)
            if micros:
                raise other_batches(self.source)
            self.end_epoch()
        finally:
            if cursor.micro is micro:
                cursor.micro = outer

    def groups(self) -> Iterator[Iterable[Any]]:
        """Yield groups of micro-batches; one group is one optimizer step."""
        batches = iter(self)
        cursor = self._cursor
        for batch in batches:
            micro = cursor.micro
            assert micro is not None
            yield (batch,) if micro.last else itertools.chain((batch,), self._rest(batches))

    def _rest(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            last = self._cursor.micro.last  # type: ignore[union-attr]
            yield batch
            if last:
                return

    def _begin(self) -> Iterator[Any]:
        """Start the epoch's iterator; its order is drawn with the first batch. The plan has the facts of each batch."""
        plan = self._plan
        if not self._resuming and plan.order is not None:
            self.end_epoch()  # the one before was left early
        self._resuming = False
        passing, self._passing = self._passing, 0
        set_epoch(self.source, self.epoch)
        limit = None if self.limit is None else max(0, self.limit - self.batches)
        if isinstance(plan, StreamedBatches):
            plan.begin(self.epoch, self.samples, limit)
            iterator = plan.start(lambda: iter(self._view), self._started)
            self._started = getattr(self._view, "persistent_workers", False)
            batches = plan.batches(iterator)
            return self._after(passing, batches) if passing else batches
        plan.begin(self.epoch, self.samples, limit, passing)
        return self._after(passing, iter(self._view)) if passing else iter(self._view)

    def _after(self, passing: int, batches: Iterator[Any]) -> Iterator[Any]:
        """Count the batches that the epoch begins without; a stream has to read them."""
        plan = self._plan
        if isinstance(plan, StreamedBatches):
            for _ in itertools.islice(batches, passing):
                micro, drawn = plan.micros.popleft()
                self.samples += micro.everyone
                self.batches += 1
                if drawn is not None:
                    self._stream.state = drawn
            yield from batches
            return
        first = list(itertools.islice(batches, 1))
        self.samples += plan.passed_samples
        self.batches += passing
        if not first and plan.drawn is not None:
            self._stream.state = plan.drawn
        yield from itertools.chain(first, batches)

    def start_at(self, batch: int) -> None:
        """Let the coming iteration begin at ``batch`` of the running epoch, wherever a resume has put it.

        Raises:
            ValueError: for a stream that has passed it already.
        """
        if not self._resuming and self._plan.order is not None:
            self.end_epoch()  # the one before was left early
        if self._resuming and self.length is not None and self.batches >= self.length:
            self.end_epoch()  # saved with its last batch: the running epoch is the next one
            self._resuming = False
        if isinstance(self._plan, StreamedBatches):
            if batch < self.batches:
                raise ValueError(f"batch {batch} of the stream has passed, {self.batches} were read; it can't go back.")
            self._passing = batch - self.batches
        else:
            self.samples = self.batches = 0
            self._passing = batch

    def end_epoch(self) -> None:
        """Go on with the next epoch, even if this one was left early. Happens by itself when it is exhausted."""
        if self._plan.order is not None:
            self.epoch += 1
            self.samples = self.batches = 0
            self._plan.order = self._micro = None

    def __len__(self) -> int:
        """Micro-batches that this process yields in a whole epoch.

        Raises:
            TypeError: if the source has no length.
        """
        count = self.length
        if count is None:
            raise TypeError(f"{type(self.source).__name__} has no length")
        return count

    @property
    def length(self) -> int | None:
        """As ``len``, or None where the source has no length."""
        plan = self._plan
        if isinstance(plan, ShardedBatches):
            return self.limit if sized(plan.sampler) is None else plan.total(self.limit)
        count = sized(self.source)
        if count is not None:
            count = -(-count // plan.planner.size)
        return count if self.limit is None else min(self.limit, self.limit if count is None else count)

    def __getattr__(self, name: str) -> Any:
        # `loader.dataset`, `loader.batch_size`, ...: the user's own.
        if name == "source" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.source, name)

    @property
    def total_batch_size(self) -> int:
        """Samples in a full batch, over all processes."""
        plan = self._plan
        return (plan.batch_size if isinstance(plan, ShardedBatches) else plan.counted or 1) * plan.planner.size

    @property
    def left_out(self) -> int:
        """Samples of each epoch that ``drop_last`` leaves out: those of a last, short global batch."""
        plan = self._plan
        if not isinstance(plan, ShardedBatches) or not plan.drop_last or sized(plan.sampler) is None:
            return 0
        return len(plan.sampler) % self.total_batch_size  # type: ignore[arg-type]

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset."""
        return len(self.source.dataset)  # type: ignore[attr-defined]

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch that was yielded last is the epoch's last."""
        return bool(self.batches) and self.length is not None and self.batches >= self.length

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next, or runs: samplers and datasets with a ``set_epoch`` are told."""
        self.epoch = epoch

    def close(self) -> None:
        """End persistent workers. Left to the garbage collector, each would be waited for five seconds."""
        if isinstance(self.source, DataLoader):
            self._view.__dict__["_iterator"] = None

    # -- position ------------------------------------------------------------------------------------------------

    def agree(self, world: World) -> None:
        """See that the data is the same on every process, and take rank zero's private generators: one order."""
        if world.size == 1 or self._plan.planner.size == 1:
            return
        if isinstance(self._plan, ShardedBatches):
            check_same_data(self.source.dataset, world)  # type: ignore[attr-defined]
        if self._plan.draws.private:
            self._plan.draws.load_private(world.broadcast(self._plan.draws.private_states()))

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the samples of it that were yielded (over all processes), and what its order was drawn from.

        Raises:
            ValueError: inside a group of micro-batches, whose gradients no state holds.
        """
        plan, micro = self._plan, self._micro
        if micro is not None and not micro.last:
            raise ValueError(
                "the loader stands inside a group of micro-batches, whose gradients are in no checkpoint. Save when "
                "accelerator.sync_gradients is true, after the optimizer's step."
            )
        drawn = None if micro is None else self._drawn
        return {
            "epoch": self.epoch,
            "samples": self.samples,
            "batches": self.batches,
            "order": plan.order,
            "generators": plan.draws.private_states(),
            "started": self._started,
            "source": plan.state(drawn) if isinstance(plan, StreamedBatches) else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the samples that `state_dict` counted, in the same order, on any number of processes."""
        plan = self._plan
        plan.draws.load_private(state["generators"])
        self.epoch, self.samples, self.batches = state["epoch"], state["samples"], state["batches"]
        if isinstance(plan, StreamedBatches):
            plan.load_state(state["source"])
        elif plan.plain:  # the batches of this number of processes
            self.batches = -(-self.samples // (plan.batch_size * plan.planner.size))
        plan.order = state["order"]
        self._micro = None
        self._resuming = plan.order is not None
        self._started = state["started"]


def _unwrap(view: DataLoader[Any], plan: StreamedBatches) -> None:
    """Let the sizes that `Counted` adds end where ``view``'s own ``__iter__`` begins."""
    weak = weakref.ref(view)  # as above

    def get_iterator() -> Any:
        own_view = weak()
        assert own_view is not None
        iterator = type(own_view)._get_iterator(own_view)
        plan.started()
        return Unwrapped(iterator, plan.sizes)

    view.__dict__["_get_iterator"] = get_iterator


def shards_itself(loader: Any) -> bool:
    """Whether a loader's sampler gives each process a part of its own, as a ``DistributedSampler`` does."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    return any(
        isinstance(s, DistributedSampler) or (hasattr(s, "num_replicas") and hasattr(s, "rank")) for s in samplers
    )


def _stateful(source: Any) -> Any:
    return source if hasattr(source, "state_dict") and hasattr(source, "load_state_dict") else None


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the dataset and the samplers of ``loader`` that have a ``set_epoch`` which epoch begins."""
    batches = getattr(loader, "batch_sampler", None)
    owners = (
        getattr(loader, "dataset", None),
        getattr(loader, "sampler", None),
        batches,
        getattr(batches, "sampler", None),
    )
    for owner in {id(owner): owner for owner in owners}.values():
        if callable(method := getattr(owner, "set_epoch", None)):
            method(epoch)
