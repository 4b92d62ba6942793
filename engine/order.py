"""Which samples, in which order, and which of them are this process's."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from .random_state import RandomStream, random_state

# These draw from the default generators when an epoch begins and never again, so nothing has to be swapped later.
_DRAW_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(slots=True)
class Micro:
    """The facts of one micro-batch that the loop needs.

    Attributes:
        samples: how many samples of it are this process's own; 0 for a stand-in that only keeps the processes in step.
        scale: what its mean loss is multiplied by, so that the step's gradient is the mean over the whole group.
        last: whether it ends its group, so that gradients are reduced and the optimizer steps.
        group_samples: samples of its whole group, over all processes.
        consumed: samples of the epoch that are behind us once it is trained on, over all processes.
    """

    samples: int
    scale: float
    last: bool
    group_samples: int
    consumed: int


def share(count: int, rank: int, size: int) -> slice:
    """Process ``rank``'s part of ``count`` samples: contiguous, sizes differ by at most one, rank zero's never less."""
    base, extra = divmod(count, size)
    start = rank * base + min(rank, extra)
    return slice(start, start + base + (rank < extra))


class GroupPlanner:
    """Cuts a stream of batches into groups that form one optimizer step each, with exact weights.

    Args:
        rank: this process.
        size: number of processes.
        accumulate: returns how many micro-batches form a group; asked anew for each group.
    """

    def __init__(self, rank: int, size: int, accumulate: Callable[[], int]) -> None:
        self.rank = rank
        self.size = size
        self.accumulate = accumulate

    def plan(self, sizes: list[tuple[int, int]], consumed: int) -> Iterator[Micro]:
        """Yield the facts of one group's micro-batches.

        Args:
            sizes: per micro-batch, (samples of this process, samples of all processes).
            consumed: samples of the epoch before this group, over all processes.
        """
        total = sum(everyone for _, everyone in sizes)
        for number, (own, everyone) in enumerate(sizes, start=1):
            consumed += everyone
            # Gradients are averaged over the processes, hence `size`; every sample then weighs 1 / total.
            scale = self.size * own / total if total else 0.0
            yield Micro(own, scale, number == len(sizes), total, consumed)


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
        self.planner = planner
        self.stream = stream
        self.merge_tail = merge_tail
        self.positions = positions
        self.limit: int | None = None
        self.skip = 0
        self.micros: deque[Micro] = deque()
        self._primed: Iterator[Any] | None = None
        inner = getattr(self.sampler, "sampler", self.sampler)
        self._draws_once = type(self.sampler) in _DRAW_ONCE and type(inner) in _DRAW_ONCE
        self._generators = _generators(loader, batches, self.sampler, inner)

    # -- order ---------------------------------------------------------------------------------------------------

    def order_state(self) -> dict[str, Any]:
        """Everything the sampler will draw from in the epoch that is about to begin."""
        return {
            "stream": dict(self.stream.state),
            "generators": [_get_generator_state(g) for g in self._generators],
        }

    def load_order_state(self, state: dict[str, Any]) -> None:
        """Go back to an `order_state`, so that the same epoch comes again."""
        self.stream.state = dict(state["stream"])
        if len(state["generators"]) != len(self._generators):
            raise ValueError(
                f"the checkpoint's sampler drew from {len(state['generators'])} generators of its own, this one has "
                f"{len(self._generators)}: pass the same kind of sampler, or resume with weights only."
            )
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            _set_generator_state(generator, saved)

    def prime(self) -> None:
        """Draw the epoch's order now, while the caller lends the stream."""
        if self._primed is None:
            batches = self._batches()
            first = list(itertools.islice(batches, 1))
            self._primed = itertools.chain(first, batches)

    def __iter__(self) -> Iterator[Any]:
        # A generator: nothing may be drawn before the loader has drawn its workers' seed, as in a plain loop.
        self.prime()
        batches, self._primed = self._primed, None
        yield from batches or ()

    def __len__(self) -> int:
        """Batches this process yields in an epoch, from its beginning.

        Raises:
            TypeError: if the user's sampler has no length.
        """
        total = len(self.sampler)  # type: ignore[arg-type]
        size = self.planner.size
        if not self.plain:
            count = total // size if self.drop_last else -(-total // size)
        else:
            count, rest = divmod(total, self.batch_size * size)
            merged = self.merge_tail and count and rest < size
            count += bool(rest) and not self.drop_last and not merged
        return count if self.limit is None else min(count, self.limit)

    def _pull(self) -> Iterator[Any]:
        """The user's sampler, item by item, drawing from the stream and not from the process's own state."""
        source = iter(self.sampler)
        with self.stream.drawing():
            first = list(itertools.islice(source, 1))
            rest = RandomStream(random_state())
        # A sampler that draws as it goes has a stream of its own from here, or the workers' reading ahead and the
        # validation loaders between would change what it draws.
        return itertools.chain(first, source if self._draws_once else _drawn_from(rest, source))

    def _global_batches(self) -> Iterator[tuple[list[Any], list[int] | None]]:
        """Global batches as flat indices; with the sizes of the user's own batches where those must be kept."""
        items = self._pull()
        size = self.planner.size
        if self.plain:
            width = self.batch_size * size
            for _ in itertools.islice(items, self.skip):
                pass
            while chunk := list(itertools.islice(items, width)):
                if len(chunk) == width or not self.drop_last:
                    yield chunk, None
            return
        skipped = 0
        while skipped < self.skip and (item := next(items, None)) is not None:
            skipped += len(item) if self.batched else 1
        while batches := list(itertools.islice(items, size)):
            if not self.batched:
                yield batches, [1] * size if len(batches) == size else None
            elif len(batches) == size:
                yield list(itertools.chain.from_iterable(batches)), [len(batch) for batch in batches]
            elif not self.drop_last:
                yield list(itertools.chain.from_iterable(batches)), None

    def _limited(self) -> Iterator[tuple[list[Any], list[int] | None]]:
        batches = _merge_tail(self._global_batches(), self.planner.size) if self.merge_tail else self._global_batches()
        return itertools.islice(batches, self.limit)

    def _batches(self) -> Iterator[Any]:
        rank, size = self.planner.rank, self.planner.size
        consumed = self.skip
        epoch_seed = self.stream.seed()
        self.micros.clear()
        batches = self._limited()
        while group := list(itertools.islice(batches, self.planner.accumulate())):
            parts = []
            for indices, widths in group:
                if widths is None:
                    parts.append(share(len(indices), rank, size))
                else:
                    start = sum(widths[:rank])
                    parts.append(slice(start, start + widths[rank]))
            sizes = [(p.stop - p.start, len(i)) for p, (i, _) in zip(parts, group, strict=True)]
            micros = self.planner.plan(sizes, consumed)
            for part, (indices, _), micro in zip(parts, group, micros, strict=True):
                # An empty share takes part with one sample of weight zero, so that the collectives match.
                own = indices[part] or indices[:1]
                if self.positions:
                    first = consumed + part.start
                    own = [(epoch_seed, first + offset, index) for offset, index in enumerate(own)]
                self.micros.append(micro)
                consumed = micro.consumed
                yield own if self.batched else own[0]


def _drawn_from(stream: RandomStream, source: Iterator[Any]) -> Iterator[Any]:
    while True:
        with stream.drawing():
            item = list(itertools.islice(source, 1))
        if not item:
            return
        yield item[0]


def _merge_tail(batches: Iterator[Any], size: int) -> Iterator[Any]:
    held = next(batches, None)
    for batch in batches:
        if len(batch[0]) < size and held is not None:
            yield [*held[0], *batch[0]], None
            return
        yield held
        held = batch
    if held is not None:
        yield held


def _generators(*owners: Any) -> list[Any]:
    """The private generators of the user's loader and samplers, each once, in a fixed order."""
    found: list[Any] = []
    for owner in owners:
        for _, value in sorted(getattr(owner, "__dict__", {}).items()):
            kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
            if isinstance(value, kinds) and not any(value is known for known in found):
                found.append(value)
    return found


def _get_generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.bit_generator.state


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def sized(value: Any) -> int | None:
    """``len(value)``, or None where it has none."""
    if not isinstance(value, Sized):
        return None
    try:
        return len(value)
    except TypeError:  # a DataLoader over a stream has __len__ and no length
        return None
