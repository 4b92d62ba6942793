"""Batches from a source that can not be indexed: an IterableDataset, a generator, any iterable of batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..strategies import warn
from .order import GroupPlanner, Micro
from .random_state import RandomStream


class Counted:
    """A collate function that also says how many samples it was given. Works in worker processes."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> tuple[int, Any]:
        return len(samples), self.collate(samples)


class StreamedBatches:
    """Deals the batches of one stream to the processes in turn, in groups with exact weights.

    Every process reads the whole stream, as nothing is known of it; the r-th of each ``size`` batches is process r's.
    The last, short round is dealt as it is, and a process without a batch of its own takes part with weight zero.

    Args:
        counted: whether the source yields ``(samples, batch)``; else each batch weighs the same.
        planner: groups and weights.
        stream: where given, what the source draws from, so that every process reads the same; else the process's own.
    """

    def __init__(self, counted: bool, planner: GroupPlanner, stream: RandomStream | None) -> None:
        self.counted = counted
        self.planner = planner
        self.stream = stream
        self.limit: int | None = None
        self.skip = 0

    def batches(self, source: Iterable[Any]) -> Iterator[tuple[Micro, Any]]:
        """Yield this process's micro-batches with their facts."""
        rank, size = self.planner.rank, self.planner.size
        items = self._items(source)
        consumed = self._fast_forward(items)
        left = self.limit
        while left is None or left > 0:
            width = self.planner.accumulate() if left is None else min(left, self.planner.accumulate())
            group = list(itertools.islice(items, width * size))
            if not group:
                return
            rounds = [group[start : start + size] for start in range(0, len(group), size)]
            sizes = [(r[rank][0] if rank < len(r) else 0, sum(count for count, _ in r)) for r in rounds]
            for micro, dealt in zip(self.planner.plan(sizes, consumed), rounds, strict=True):
                consumed = micro.consumed
                yield micro, dealt[min(rank, len(dealt) - 1)][1]
            left = None if left is None else left - len(rounds)

    def _items(self, source: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        iterator = iter(source)
        if self.stream is None:
            yield from iterator if self.counted else ((1, batch) for batch in iterator)
            return
        own = RandomStream(self.stream.state)
        while True:
            with own.drawing():
                item = list(itertools.islice(iterator, 1))
            if not item:
                return
            yield item[0] if self.counted else (1, item[0])

    def _fast_forward(self, items: Iterator[tuple[int, Any]]) -> int:
        passed = 0
        if self.skip:
            warn(
                f"the stream has no state of its own, so {self.skip} samples are read again and passed over to resume "
                "where the run stopped. A dataset with state_dict/load_state_dict resumes at once."
            )
        while passed < self.skip and (item := next(items, None)) is not None:
            passed += item[0]
        return passed
