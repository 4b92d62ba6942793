"""The user's loader, sharded exactly, grouped into optimizer steps, and able to say and resume where it is."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ..strategies import World
from .order import GroupPlanner, Micro, ShardedBatches, sized
from .random_state import RandomStream
from .stream import Counted, StreamedBatches


class Cursor:
    """Where the loop is: the micro-batch that was yielded last. Shared by an Accelerator and its loaders."""

    __slots__ = ("micro",)

    def __init__(self) -> None:
        self.micro: Micro | None = None


class SeededSamples:
    """A dataset whose every sample is drawn from a random state of its own. Used inside loader workers only.

    The seed follows from the epoch and the sample's position in it, so a resume, or another number of workers or
    processes, sees the same augmentations; and a sample drawn twice in an epoch is augmented in two ways.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        if getattr(dataset, "__getitems__", None):
            self.__getitems__ = self._get_items

    def __getitem__(self, item: tuple[int, int, Any]) -> Any:
        self._seed(item)
        return self.dataset[item[2]]

    def _get_items(self, items: list[tuple[int, int, Any]]) -> Any:
        self._seed(items[0])
        return self.dataset.__getitems__([index for _, _, index in items])

    @staticmethod
    def _seed(item: tuple[int, int, Any]) -> None:
        # An odd multiplier spreads neighbouring positions over the 63 bits (Knuth, TAOCP 3.3.4: MMIX's constant).
        seed = (item[0] + item[1] * 6364136223846793005) % 2**63
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


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
    ) -> None:
        if not isinstance(source, Iterable) and not hasattr(source, "__getitem__"):
            raise TypeError(
                f"a loader must be a DataLoader or another iterable of batches, not {type(source).__name__}: {source!r}"
            )
        self.source = source
        self.move = move
        self.epoch = 0
        self.samples = 0  # of this epoch, over all processes
        self.batches = 0  # of this epoch, of this process
        self.limit: int | None = None
        self._cursor = cursor
        self._stream = stream
        self._resume: dict[str, Any] | None = None
        self._order: dict[str, Any] | None = None
        sharded = shard and not isinstance(getattr(source, "sampler", None), DistributedSampler)
        rank, size = (world.rank, world.size) if sharded else (0, 1)
        planner = GroupPlanner(rank, size, (lambda: 1) if evaluation else accumulate)
        self._plan: ShardedBatches | StreamedBatches
        self._view: Any = source
        if isinstance(source, DataLoader):
            self._prepare_view(source, planner, evaluation)
        else:
            self._plan = StreamedBatches(False, planner, None)

    def _prepare_view(self, source: DataLoader[Any], planner: GroupPlanner, evaluation: bool) -> None:
        if not getattr(source, "in_order", True):
            raise ValueError(
                "DataLoader(in_order=False) yields batches in the order its workers finish, so no run could be "
                "repeated or resumed. Use in_order=True."
            )
        view = self._view = copy.copy(source)
        settings = view.__dict__  # DataLoader forbids to set these by name once it is built
        settings["_iterator"] = None
        if isinstance(source.dataset, IterableDataset):
            counted = source.batch_size is not None
            if counted:
                settings["collate_fn"] = Counted(source.collate_fn)
            # Without workers a stream draws from the process's state, which may differ; workers get one seed from all.
            agreed = self._stream if planner.size > 1 and source.num_workers == 0 else None
            self._plan = StreamedBatches(counted, planner, agreed)
            return
        workers = source.num_workers > 0
        self._plan = ShardedBatches(source, planner, self._stream, evaluation, positions=workers)
        settings["batch_sampler" if source.batch_sampler is not None else "sampler"] = self._plan
        if workers:
            settings["dataset"] = SeededSamples(source.dataset)

    # -- iteration -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield this process's micro-batches of one epoch; each is announced to the cursor first."""
        pairs = self._begin()
        cursor, move = self._cursor, self.move
        outer = cursor.micro  # of a loop around this one, such as training around a validation
        for micro, batch in pairs:
            cursor.micro = micro
            self.samples = micro.consumed
            self.batches += 1
            yield batch if move is None else move(batch)
        cursor.micro = outer
        self.end_epoch()

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

    def _begin(self) -> Iterator[tuple[Micro, Any]]:
        """Draw the epoch's order and start the workers."""
        batches, stream = self._plan, self._stream
        resume, self._resume = self._resume, None
        now = dict(stream.state)
        if resume is not None:
            self._load_order(resume["order"])
        elif self._order is not None:
            self.end_epoch()  # the one before was left early
        set_epoch(self.source, self.epoch)
        self._order = self._order_state()
        batches.skip = self.samples
        batches.limit = None if self.limit is None else max(0, self.limit - self.batches)
        with stream.drawing():
            iterator = iter(self._view)
            if isinstance(batches, ShardedBatches):
                batches.prime()
        if resume is not None:
            stream.state = now  # what the epoch drew when it began is in there already
        if isinstance(batches, StreamedBatches):
            return batches.batches(iterator)
        return self._match(iterator, batches)

    def end_epoch(self) -> None:
        """Go on with the next epoch, even if this one was left early. Happens by itself when it is exhausted."""
        if self._order is not None:
            self.epoch += 1
            self.samples = self.batches = 0
            self._order = None

    def _match(self, iterator: Iterator[Any], batches: ShardedBatches) -> Iterator[tuple[Micro, Any]]:
        micros = batches.micros
        for batch in iterator:
            if not micros:
                raise ValueError(
                    f"{type(self.source).__name__} yields batches without drawing them from its batch_sampler, so it "
                    "can be neither sharded nor resumed. Let its __iter__ call super().__iter__(), or pass it with "
                    "use_distributed_sampler=False as a plain iterable: iter(loader)."
                )
            yield micros.popleft(), batch

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
        batches = self._plan
        if isinstance(batches, ShardedBatches):
            count = sized(batches)
        else:
            total = sized(self.source)
            count = None if total is None else -(-total // batches.planner.size)
        if self.limit is None:
            return count
        return self.limit if count is None else min(count, self.limit)

    def __getattr__(self, name: str) -> Any:
        # `loader.dataset`, `loader.batch_size`, ...: the user's own.
        if name == "source" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.source, name)

    # -- position ------------------------------------------------------------------------------------------------

    def _order_state(self) -> dict[str, Any]:
        if isinstance(self._plan, ShardedBatches):
            return self._plan.order_state()
        return {"stream": dict(self._stream.state), "generators": []}

    def _load_order(self, state: dict[str, Any]) -> None:
        if isinstance(self._plan, ShardedBatches):
            self._plan.load_order_state(state)
        else:
            self._stream.state = dict(state["stream"])

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the samples of it that were yielded (over all processes), and what its order was drawn from."""
        return {
            "epoch": self.epoch,
            "samples": self.samples,
            "batches": self.batches,
            "order": self._order,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the samples that `state_dict` counted, in the same order, on any number of processes."""
        self.epoch = state["epoch"]
        self.samples = state["samples"]
        self.batches = state["batches"]
        self._resume = state if state["order"] is not None else None


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers of ``loader`` that have a ``set_epoch`` which epoch begins."""
    for owner in (
        getattr(loader, "dataset", None),
        getattr(loader, "sampler", None),
        getattr(loader, "batch_sampler", None),
    ):
        if callable(method := getattr(owner, "set_epoch", None)):
            method(epoch)
