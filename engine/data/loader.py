"""Prepared dataloader that yields this process's share of the data and can be resumed."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from ...common.messages import name_type, warn
from ...strategies import FixedTree, World
from ...strategies.distributed import name_phase
from ..rng import Draw, RandomStream, isolated_random_state, seed_micro_batch
from .dataset_check import find_least, warn_length_changed, warn_order_changed
from .epoch_position import EpochPosition, Phase
from .micro_batches import Cursor, GroupPlanner, Micro
from .sampler_rng import (
    Draws,
    find_generators,
    get_stateful,
    load_states,
    match_generators,
    read_states,
    warn_unrestored_generators,
)
from .sharded_sampler import GroupIndices, ShardedBatches, get_length, set_epoch, shards_itself
from .source_libraries import explain_not_repeatable, explain_state_gap
from .streamed_batches import (
    Counted,
    StreamedBatches,
    follow_iterator,
    has_user_iter,
    make_batches_error,
    may_read_ahead,
    reads_other_loaders,
)
from .user_iter import UserBatches
from .workers import (
    KnownEpoch,
    LiveWithRank,
    SeededCollate,
    SeededSamples,
    SeededStream,
    WorkerMemory,
    end_workers,
    iterate_in_process,
    known_epoch,
    note_workers,
)

_NO_MORE = object()

INSIDE_GROUP = (
    "the dataloader's state was requested during gradient accumulation, but a checkpoint does not contain accumulated "
    "gradients. Save it when accelerator.sync_gradients is True, after optimizer.step()."
)


class Loader:
    """Dataloader that yields this process's share of the data and can be resumed.

    `Accelerator.prepare` wraps the user's dataloader in this class. A ``DataLoader`` is not rebuilt. The wrapper
    iterates over a shallow copy of it, which has the same class.

    Args:
        source: A ``DataLoader`` or any other iterable of batches.
        world: The processes that share the data.
        cursor: Position of the loop, shared by the Accelerator and its dataloaders.
        stream: The random stream that samplers without their own generator draw from.
        accumulate: Function that returns the number of micro-batches of an optimizer step, given the step's index since
            the start of the iteration.
        shard: If False, each process yields all batches of its own dataloader. Default: True.
        evaluation: Whether the batches are used for evaluation. If True, ``accumulate`` is ignored. Default: False.
        move: Function that is applied to each batch, for example to move it to the device. Default: None.
        split: If True, ``batch_size`` is the global batch size. Default: False.
        on_begin: Function that is called each time iteration over the dataloader begins. Default: a function that does
            nothing.
        tree: The `FixedTree` in which the micro-batches of a step are added; None without one. Default: None.

    Attributes:
        limit: Maximum number of batches per epoch; None for no limit.

    Raises:
        TypeError: If the source is not iterable.
        ValueError: If a setting of the source is not supported.

    Examples:
        >>> import treadle
        >>> from torch.utils.data import DataLoader
        >>> accelerator = treadle.Accelerator(cpu=True)
        >>> loader = accelerator.prepare(DataLoader(range(6), batch_size=4))
        >>> for batch in loader:
        ...     print(batch.tolist(), loader.end_of_dataloader)
        [0, 1, 2, 3] False
        [4, 5] True
    """

    dispatch_batches: bool | None = None  # `Accelerator.dispatch_batches`, which has no effect

    def __init__(
        self,
        source: Iterable[Any],
        *,
        world: World,
        cursor: Cursor,
        stream: RandomStream,
        accumulate: Callable[[int], int],
        shard: bool = True,
        evaluation: bool = False,
        move: Callable[[Any], Any] | None = None,
        split: bool = False,
        on_begin: Callable[[], None] = lambda: None,
        tree: FixedTree | None = None,
    ) -> None:
        if not isinstance(source, Iterable) and not hasattr(source, "__getitem__"):
            raise TypeError(
                f"{source!r} ({name_type(source)}) is not a dataloader. Pass a DataLoader or another iterable of "
                "batches."
            )
        self.source = source
        self.move = move
        self.evaluation = evaluation
        self._position = EpochPosition()
        self.limit: int | None = None
        self._cursor = cursor
        self._on_begin = on_begin
        self._stream = stream
        # The last micro-batch of this epoch, the position of a copy of the stream there, and the indices of its group.
        self._last: tuple[Micro, Draw | None, GroupIndices | None] | None = None
        self._reads: list[Any] = []  # the dataset's own generators, if this process reads the dataset
        self._worker_memory: WorkerMemory | None = None
        self._known_epoch: KnownEpoch | None = None  # what the dataset's copies in new workers have received
        self._repeats = False  # whether each epoch has the first one's order
        self._first: dict[str, Any] | None = None  # the state that this order was drawn from
        self._plan: ShardedBatches | StreamedBatches
        self._reader: ShardedBatches | StreamedBatches | UserBatches  # the plan, or what groups its batches anew
        self._view: Any = source
        self._tree = tree
        if tree is not None and (obstacle := _find_obstacle(source, shard, split)) is not None:
            if not evaluation:
                raise ValueError(_explain_leaves(obstacle))
            self._tree = None
            warn(
                f"values that are logged in the evaluation of {obstacle} depend on the number of processes, although "
                "step_micro_batches is set. Use a DataLoader with a map-style dataset that is the same on all ranks."
            )
        self._prepare(source, world, shard, (lambda _: 1) if evaluation else accumulate, split)

    def _prepare(self, source: Any, world: World, shard: bool, accumulate: Callable[[int], int], split: bool) -> None:
        presharded = not shard or shards_itself(source)
        planner = GroupPlanner(world.rank, world.size, accumulate, presharded, self._tree)
        if isinstance(source, DataLoader) and (shard or world.size == 1 or not reads_other_loaders(source)):
            self._prepare_view(source, planner)
        else:
            # A list draws nothing, so it needs no random stream.
            draws_later = not isinstance(source, list | tuple)
            draws, stateful = Draws(self._stream, source), get_stateful(source)
            self._reader = self._plan = StreamedBatches(
                source, None, planner, draws, self._position, draws_later, stateful
            )
        if split and planner.size > 1:
            self._plan.split()

    def _prepare_view(self, source: DataLoader[Any], planner: GroupPlanner) -> None:
        if not getattr(source, "in_order", True):
            raise ValueError(
                "DataLoader(in_order=False) yields batches in the order in which its workers finish, so a run cannot "
                "be reproduced or resumed. Use in_order=True."
            )
        view = self._view = copy.copy(source)
        settings = view.__dict__  # a DataLoader refuses to set these by name after its construction
        settings["_iterator"] = None
        workers = source.num_workers > 0
        if workers:
            settings["worker_init_fn"] = init = LiveWithRank(source.worker_init_fn, source.num_workers)
            self._worker_memory = init.memory
        if isinstance(source.dataset, IterableDataset):
            self._prepare_stream(source, planner)
            return
        seeds_samples = workers or planner.tree is not None
        plan = self._reader = self._plan = ShardedBatches(
            source, planner, self._stream, self._position, self.evaluation, positions=seeds_samples
        )
        settings["batch_sampler" if source.batch_sampler is not None else "sampler"] = plan
        if seeds_samples:
            settings["dataset"] = samples = SeededSamples(source.dataset, plan.batched)
            settings["collate_fn"] = SeededCollate(source.collate_fn)
            self._known_epoch = known_epoch(samples)
        else:
            self._reads = find_generators(source.dataset)
        if has_user_iter(source) and planner.world_size == 1:  # it may read other loaders too
            self._reader = UserBatches(type(source).__name__, plan, self._reads, self.evaluation)
        # Not around `iter(view)`, because a subclass whose __iter__ is a generator starts the workers later. The
        # reference is weak, because a cycle would keep persistent workers alive.
        weak_view = weakref.ref(view)
        start: Callable[[DataLoader[Any]], Iterator[Any]] = type(view)._get_iterator
        if start is DataLoader._get_iterator and not workers and not source.pin_memory:
            start = iterate_in_process

        def get_iterator() -> Any:
            live_view = weak_view()
            assert live_view is not None
            return plan.open(lambda: note_workers(live_view, start(live_view)))

        settings["_get_iterator"] = get_iterator

    def _prepare_stream(self, source: DataLoader[Any], planner: GroupPlanner) -> None:
        settings, workers = self._view.__dict__, source.num_workers > 0
        collate = None
        if source.batch_size is not None:
            settings["collate_fn"] = collate = Counted(source.collate_fn, source.batch_size)
        draws = Draws(self._stream, source, dataset=source.dataset)
        # A subclass's own __iter__ may draw the workers' seed late, or draw other numbers.
        draws_later = not workers or type(source).__iter__ is not DataLoader.__iter__
        # A loader that records its position also records that of its workers.
        knows = get_stateful(self._view)
        if knows is None and not workers:
            knows = get_stateful(source.dataset)
        gap = explain_state_gap(source.dataset)
        if gap:
            knows = None
        if knows is None and not self.evaluation and (reason := explain_not_repeatable(source.dataset)):
            warn(f"a run cannot resume exactly within an epoch of this stream, because {reason}.")
        cursor = self._cursor if not self.evaluation and may_read_ahead(source, knows) else None
        streamed = self._reader = self._plan = StreamedBatches(
            source, collate, planner, draws, self._position, draws_later, knows, gap, cursor
        )
        if source.persistent_workers and not isinstance(source.dataset, IterDataPipe):
            settings["dataset"] = streamed.seeded = SeededStream(source.dataset)
        follow_iterator(self._view, streamed)

    # -- iteration -----------------------------------------------------------------------------------------------

    @name_phase("data wait")
    def __iter__(self) -> Iterator[Any]:
        """Yield this process's micro-batches of one epoch."""
        return self._run(None)

    def begun(self) -> Iterator[Any]:
        """Begin the epoch immediately, before the first batch is requested, and return an iterator over it."""
        return self._run(self._begin())

    def _run(self, batches: Iterator[Any] | None, *, end: bool = True) -> Iterator[Any]:
        self._on_begin()
        if batches is None:
            batches = self._begin()
        micros: Any = self._reader.micros
        cursor, stream, move = self._cursor, self._stream, self.move
        planner, position, seeded = self._plan.planner, self._position, self._tree is not None
        # The state of a loop around this one, such as training around a validation.
        outer = cursor.micro, cursor.number, cursor.outlook
        micro: Micro | None = None
        try:
            while True:
                began = perf_counter()
                batch = next(batches, _NO_MORE)
                cursor.waited += perf_counter() - began
                if batch is _NO_MORE:
                    break
                if not micros:
                    raise make_batches_error(self.source)
                self._last = micro, drawn, indices = micros.popleft()
                cursor.micro = micro
                cursor.read = cursor.number = cursor.read + 1
                position.samples += micro.everyone
                position.batches += 1
                if drawn is not None and planner.shares is None:  # otherwise the ranks have drawn different numbers
                    stream.follow(drawn)
                batch = batch if move is None or batch is None else move(batch)
                if seeded:
                    seed_micro_batch(indices.seeds[micro.number])  # type: ignore[union-attr]
                if cursor.around is None:
                    yield batch
                else:
                    with cursor.around(0 < micro.everyone < self._plan.full and position.batches > 1):
                        yield batch
            if micros:
                raise make_batches_error(self.source)
            if end:
                self.end_epoch()
        finally:
            if cursor.micro is micro:
                cursor.micro, cursor.number, cursor.outlook = outer

    def read_placeholder(self) -> Any:
        """Return a batch of one sample for a process whose batch is None, but that must stay in step with the others.

        Returns:
            A batch from the samples of all processes in the current group; None if none of them can be read.
        """
        source, found = self.source, None
        indices = None if self._last is None else self._last[2]
        if indices is None or not isinstance(source, DataLoader):
            return None
        states = read_states(self._reads)
        with isolated_random_state():
            for index in itertools.chain.from_iterable(batch for batch, _ in indices.global_batches):
                sample = source.dataset[index]
                found = source.collate_fn(sample if source.batch_sampler is None else [sample])
                if found is not None:
                    break
        load_states(self._reads, states)
        return found if found is None or self.move is None else self.move(found)

    @name_phase("data wait")
    def groups(self) -> Iterator[Iterable[Any]]:
        """Yield the epoch's groups of micro-batches, one per optimizer step.

        The caller must call `end_epoch` after the last group.
        """
        batches = self._run(None, end=False)
        cursor = self._cursor
        for batch in batches:
            micro = cursor.micro
            assert micro is not None
            yield (batch,) if micro.last else itertools.chain((batch,), self._finish_group(batches))

    def _finish_group(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            last = self._cursor.micro.last  # type: ignore[union-attr]
            yield batch
            if last:
                return

    def _begin(self) -> Iterator[Any]:
        """Start the epoch's iterator, which appends the metadata of each batch to ``self._reader.micros``."""
        position = self._position
        if position.phase is Phase.LOADED and position.batches and not self.evaluation:
            left = position.batches if self.length is None else self.length - position.batches
            self._cursor.resumed = self._cursor.read, min(position.batches, left)
        self._leave_epoch()
        if position.order is None and self._repeats and self._first is not None:
            position.order = self._first
        position.phase = Phase.BETWEEN if position.order is None else Phase.RUNNING
        self.tell_epoch()
        limit = None if self.limit is None else max(0, self.limit - position.batches)
        return self._pass_over(self._reader.iterate(self._view, limit))

    def _pass_over(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the batches of the epoch after those that are to be skipped, unless the sampler has skipped them."""
        passing, self._position.passing = self._position.passing, 0
        return self._read_past(passing, batches) if passing else batches

    def _read_past(self, count: int, batches: Iterator[Any]) -> Iterator[Any]:
        plan = self._plan
        for _ in itertools.islice(batches, count):
            micro, drawn, _ = plan.micros.popleft()
            self._position.samples += micro.everyone
            self._position.batches += 1
            if drawn is not None and plan.planner.shares is None:
                self._stream.follow(drawn)
        yield from batches

    def start_at(self, batch: int) -> bool:
        """Make the next iteration start at ``batch`` in the current epoch instead of at the restored position.

        Args:
            batch: The index of the batch among those of this process, from 0.

        Returns:
            False if ``batch`` lies after the last batch of an epoch that `finish_epoch` has already ended; otherwise
            True.

        Raises:
            ValueError: If the dataloader is already past this batch and cannot be rewound.
        """
        position = self._position
        if position.phase is Phase.FINISHED and self.length is not None and batch >= self.length:
            position.phase = Phase.BETWEEN
            return False
        self._leave_epoch()
        self._end_loaded_epoch(batch)
        if isinstance(self._plan, ShardedBatches):
            position.rewind()
        elif batch < position.batches:
            raise ValueError(
                f"the stream cannot start at batch {batch}, because it is already at batch {position.batches}, and a "
                "stream cannot be rewound. Prepare a new dataloader."
            )
        position.passing = batch - position.batches
        return True

    def _end_loaded_epoch(self, batch: int = -1) -> None:
        """End a loaded epoch that was saved with its last batch, unless ``batch`` lies beyond it too."""
        length = self.length
        if self._position.phase is Phase.LOADED and length is not None and self.batches >= length > batch:
            self.end_epoch()

    def end_epoch(self) -> None:
        """End the epoch, even if it was left early. A full iteration calls this method."""
        if self._position.order is not None:
            if self._worker_memory is not None:
                self._worker_memory.warn_of_copies(self.epoch)
            self._first = self._first or self._position.order
            self._last = None
            self._position.end()

    def finish_epoch(self) -> bool:
        """End the resumed epoch if the restored position is after its last batch.

        Returns:
            True if this call ended the epoch.
        """
        if self._position.phase is not Phase.LOADED or self.length is None or self.batches < self.length:
            return False
        for _ in self._run(None):  # not `end_epoch` alone: a sampler may draw, or a stream change, after its last item
            raise AssertionError("an epoch that was saved after its last batch yields another batch")
        self._position.phase = Phase.FINISHED
        return True

    def _leave_epoch(self) -> None:
        """End an epoch that was left early; a number set by `set_epoch` in the meantime applies to the next epoch."""
        phase, epoch = self._position.phase, self.epoch
        if phase in (Phase.RUNNING, Phase.RENUMBERED):
            self.end_epoch()
        if phase is Phase.RENUMBERED:
            self.set_epoch(epoch)

    def keep_tail(self) -> None:
        """Yield the last, short batch in spite of ``drop_last=True``, unless the batch sampler is the user's own."""
        if isinstance(self._plan, ShardedBatches) and self._plan.plain:
            self._plan.drop_last = False

    def keep_order(self) -> bool:
        """Use the same order in every epoch.

        A ``RandomSampler`` or ``SubsetRandomSampler`` no longer shuffles. With any other sampler, and for a stream,
        each epoch repeats the order of the first epoch.

        Returns:
            True if the dataloader would otherwise shuffle; always False for a stream. A custom sampler is assumed to
            shuffle unless its ``shuffle`` attribute is False.
        """
        self._repeats = True
        return self._plan.unshuffle()

    def __len__(self) -> int:
        """Return the number of micro-batches that this process yields in a whole epoch.

        Raises:
            TypeError: If `length` is None.
        """
        count = self.length
        if count is None:
            owner = "its dataset or sampler" if isinstance(self.source, DataLoader) else "it"
            owner = "one of its iterables" if hasattr(self.source, "flattened") else owner  # a CombinedLoader
            raise TypeError(
                f"the length of the {type(self.source).__name__} is unknown, because {owner} does not define __len__."
            )
        return count

    @property
    def length(self) -> int | None:
        """Number of micro-batches of this process in an epoch; None if unknown."""
        if isinstance(self._reader, UserBatches):
            return find_least(get_length(self.source), self.limit)
        return self._plan.length(self.limit)

    @property
    def global_length(self) -> int | None:
        """Like `length`; with ``step_micro_batches``, the number over all processes, without placeholders."""
        if self._tree is None:
            return self.length
        count = self._plan.count_leaves()  # type: ignore[union-attr]
        return count if self.limit is None else min(count, self._tree.leaves_in(self.limit))

    def count_own(self, batches: int) -> int:
        """Convert a number as in `global_length` to one of this process's micro-batches, in whole steps of a tree."""
        return batches if self._tree is None else -(-batches // self._tree.leaves) * self._tree.most

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0."""
        return self._position.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._position.epoch = epoch

    @property
    def batches(self) -> int:
        """Number of batches that this process has read or skipped in this epoch."""
        return self._position.batches

    def __getattr__(self, name: str) -> Any:
        # `loader.dataset`, `loader.batch_size` and other attributes of the user's loader.
        if name in ("source", "_position") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.source, name)

    @property
    def total_batch_size(self) -> int:
        """Number of samples in a full batch over all processes; a batch of unknown size counts as 1."""
        return self._plan.full

    def step_size(self, accumulate: int) -> int:
        """Return the number of samples of an optimizer step over all processes; see `total_batch_size`."""
        if self._tree is None:
            return self.total_batch_size * accumulate
        return self._tree.leaves * self._plan.width  # type: ignore[union-attr]

    @property
    def left_out(self) -> Counter[str]:
        """Counter of the samples or batches that ``drop_last`` drops per epoch, by unit; empty if none or unknown."""
        return self._plan.left_out

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the dataset.

        Raises:
            AttributeError: If the user's dataloader has no dataset.
            TypeError: If the dataset has no length.
        """
        return len(self.source.dataset)  # type: ignore[attr-defined]

    @property
    def end_of_dataloader(self) -> bool:
        """True from the last batch of the epoch until the epoch ends; False if `length` is None."""
        return bool(self.batches) and self.length is not None and self.batches >= self.length

    @property
    def micro(self) -> Micro:
        """Metadata of the last batch that was yielded in the current epoch."""
        assert self._last is not None
        return self._last[0]

    def is_at(self, micro: Micro) -> bool:
        """Return whether ``micro`` belongs to the last batch that was yielded.

        Args:
            micro: Metadata of a batch. It is compared by identity, not by value.
        """
        return self._last is not None and self._last[0] is micro

    def draw_from(self, stream: RandomStream) -> None:
        """Draw the order from another random stream. Call this method before the first draw.

        Args:
            stream: The new random stream.
        """
        self._stream = self._plan.draws.stream = stream

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch number for the next iteration over the dataloader.

        Samplers and datasets with a ``set_epoch`` method receive the number. A resumed epoch keeps its saved order.

        Args:
            epoch: The number of the epoch, from 0.
        """
        if epoch != self.epoch:
            self._end_loaded_epoch()
        if self._position.phase is Phase.RUNNING:
            self._position.phase = Phase.RENUMBERED
        self.epoch = epoch
        self.tell_epoch()  # the sampler's length may depend on it

    def tell_epoch(self) -> None:
        """Pass the epoch number to the user's dataloader, samplers and datasets."""
        epoch = self._plan.dataset_epoch = 0 if self._repeats else self.epoch
        # Training and validation data are often subsets of one dataset. A validation amid a training epoch, which has
        # another number, must not change it.
        set_epoch(self.source, epoch, nested=self._cursor.micro is None)
        if self._known_epoch is not None:
            self._known_epoch.epoch = epoch

    def close(self) -> None:
        """Shut down the dataloader's workers, including persistent ones."""
        if isinstance(self.source, DataLoader):
            end_workers(self._view)
            self._view.__dict__["_iterator"] = None

    # -- position ------------------------------------------------------------------------------------------------

    def decide_sharding(self, world: World) -> None:
        """Determine whether all ranks read the same data or each rank reads its own data. Must be called on all ranks.

        Args:
            world: The ranks that iterate over the dataloader.

        Raises:
            ValueError: On every rank, if the ranks' data is neither identical nor entirely different, or if only some
                ranks have data.
        """
        if world.size > 1:
            self._plan.decide_sharding(world)
            if self._tree is not None and self._plan.planner.shares is not None:
                raise ValueError(_explain_leaves(f"{name_type(self.source)} of each rank's own data"))

    def state_dict(self) -> dict[str, Any]:
        """Return the dataloader's state: the epoch, the position in it, and the states that determine its order.

        Raises:
            ValueError: If it is called inside a group of micro-batches, because accumulated gradients are not saved.
        """
        if self._last is not None and not self._last[0].last:
            raise ValueError(INSIDE_GROUP)
        plan, position = self._plan, self._position
        drawn = None if self._last is None else self._last[1]
        plan.draws.warn_of_counts(position.order is not None)
        return {
            # `SAVED` written out, because a test limits the number of calls in a save.
            "epoch": position.epoch,
            "samples": position.samples,
            "batches": position.batches,
            "order": position.order,
            "started": position.started,
            "width": plan.full,
            "length": get_length(getattr(self.source, "dataset", None)),
            "items": plan.items(position.samples, position.batches) + position.items_ahead,
            "generators": read_states(plan.draws.private),
            "epochs": plan.draws.epochs(),
            "samplers": plan.draws.sampler_states(),
            "own": plan.planner.shares is not None,
            "leaves": None if self._tree is None else (self._tree.leaves, plan.width),  # type: ignore[union-attr]
            **self._reader.describe_position(drawn),
            **({"first": self._first} if self._repeats else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state returned by `state_dict`. The world size may have changed.

        Args:
            state: A state returned by `state_dict`.

        Raises:
            ValueError: If this is a training dataloader and the state does not fit it.
        """
        plan = self._plan
        if self.evaluation and self.describe_difference(state):
            self.epoch = state["epoch"]  # the loader now has another sampler, and its own order
            return
        self.check(state)
        self._reader.resume_at(state)
        if not self.evaluation:
            self.compare_epoch(state)
        plan.draws.load_private(state["generators"])
        plan.draws.load_samplers(state)
        plan.draws.load_epochs(state)
        position = self._position
        position.load_state_dict(state)
        if isinstance(plan, StreamedBatches):
            self.close()  # workers from before, if there are any, have drawn other numbers
        items = state["items"]
        if state["width"] != plan.full:  # with another number of processes, each has fewer or more batches
            position.batches = plan.batches_of(items)
        position.items_ahead = items - plan.items(position.samples, position.batches)
        self._last = None
        self._first = state.get("first")

    def check(self, state: dict[str, Any]) -> None:
        """Check that a saved state fits the dataloader.

        Args:
            state: A state returned by `state_dict`.

        Raises:
            ValueError: If the state does not fit.
        """
        if (saved := state.get("leaves")) is not None and not self.evaluation:
            self._check_leaves(*saved)
        if text := self.describe_difference(state):
            raise ValueError(
                f"{text}. Pass the same kind of dataloader and sampler, or load only the weights with "
                "treadle.load_weights."
            )

    def _check_leaves(self, leaves: int, size: int) -> None:
        now = "no step_micro_batches"
        if self._tree is not None:
            width = self._plan.width  # type: ignore[union-attr]
            if (leaves, size) == (self._tree.leaves, width):
                return
            now = f"step_micro_batches={self._tree.leaves} and batch_size={width}"
        raise ValueError(
            f"the checkpoint was saved with step_micro_batches={leaves} and batch_size={size}, but this run has {now}, "
            "so it would not continue with the same bits. Set the same values, or load only the weights with "
            "treadle.load_weights."
        )

    def compare_epoch(self, state: dict[str, Any]) -> None:
        """Warn if a state was saved within an epoch whose data or order this dataloader does not have.

        The dataset's length and the kind of the sampler are compared immediately, the first indices once they are
        drawn.
        """
        plan = self._plan
        if state["order"] is None:
            return
        length = get_length(getattr(self.source, "dataset", None))
        is_other_length = warn_length_changed(state["length"], length)
        saved, current = state["sampler"], plan.sampler_name
        if saved != current:
            warn_order_changed(
                f"the checkpoint was saved within an epoch of {saved or 'a stream'}, but the dataloader now has "
                f"{current or 'a stream'}"
            )
        elif isinstance(plan, ShardedBatches) and not is_other_length and not state["own"]:
            # Ranks with data of their own have other indices than rank zero.
            plan.expect_order(state)

    def describe_difference(self, state: dict[str, Any]) -> str:
        """Return the reason why a saved state does not fit the generators and samplers; "" if it fits."""
        return self._plan.draws.difference(state)

    def reading_state(self) -> dict[str, Any]:
        """Return the state that belongs to this rank alone.

        It contains the states of the dataset's generators. If each rank reads its own data, it also contains the
        result of `state_dict`.

        Raises:
            ValueError: If each rank reads its own data and the position is inside a group of micro-batches.
        """
        planner = self._plan.planner
        rank_state = None if planner.shares is None else self.state_dict()
        return {"generators": read_states(self._reads), "own": rank_state, "ranks": planner.world_size}

    def load_reading_state(self, state: dict[str, Any]) -> None:
        """Restore the state that belongs to this rank alone.

        The position is restored only if the world size is unchanged, and the generators only if their number and types
        match.

        Args:
            state: A state returned by `reading_state`.

        Raises:
            ValueError: If the saved position does not fit this dataloader.
        """
        if state["own"] is not None and state["ranks"] == self._plan.planner.world_size:
            self.load_state_dict(state["own"])
            plan, own = self._plan, state["own"]
            if not self.evaluation and isinstance(plan, ShardedBatches) and own["sampler"] == plan.sampler_name:
                plan.expect_order(own)
        if match_generators(self._reads, state["generators"]):
            load_states(self._reads, state["generators"])
        elif not self.evaluation:
            warn_unrestored_generators(getattr(self.source, "dataset", self.source), self._reads, state["generators"])


def batch_indices(loader: Loader, number: int | None = None) -> list[Any] | None:
    """Return the indices of the samples in this process's latest batch, or in another batch of the same group.

    Args:
        loader: A prepared loader.
        number: The batch's index in its group, from 0. Default: the latest batch.

    Returns:
        The indices that the sampler yielded; empty if the batch only keeps the ranks in step. None for a stream or a
        `CombinedLoader`, or if no batch of the current epoch has been yielded.

    Raises:
        IndexError: If the group has no batch with this index.
    """
    if loader._last is None:
        return None
    micro, _, indices = loader._last
    if indices is None:
        return None
    return indices.get_indices(micro.number if number is None else number)


def _find_obstacle(source: Any, shard: bool, split: bool) -> str | None:
    """Return what prevents that a loader's batches are assigned to processes by their number in the step, or None."""
    if not isinstance(source, DataLoader):
        return name_type(source)
    if isinstance(source.dataset, IterableDataset):
        return f"the stream of {name_type(source.dataset)}"
    if has_user_iter(source):
        return f"{name_type(source)}, whose __iter__ chooses the batches"
    if not shard or shards_itself(source):
        return "a dataloader that is already sharded"
    if split:
        return "split_batches=True"
    if find_generators(source.dataset):
        return f"{name_type(source.dataset)}, which draws from a generator of its own"
    return None


def _explain_leaves(obstacle: str) -> str:
    return (
        f"step_micro_batches can't be combined with {obstacle}, because each process must read the same micro-batches "
        "as one process would. Use a DataLoader with a map-style dataset that is the same on all ranks, or remove "
        "step_micro_batches."
    )
