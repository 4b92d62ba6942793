"""Position of a loop in its micro-batches, and the groups that form optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ...strategies import FixedTree
from .rank_shares import Outlook, RankShares


class Cursor:
    """Position of the loop, shared by an Accelerator and its loaders.

    Attributes:
        micro: Metadata of the last micro-batch that was yielded; None while no loader is iterated.
        waited: Seconds that this process has waited for batches.
        number: The number of batches read up to the current one, which distinguishes batches with the same metadata.
        around: Function that returns the context in which a batch is processed; None if no context is needed. Its
            argument is whether the batch is short and not the first of the epoch.
        outlook: This rank's votes on an upcoming group; None if the rank does not vote.
        resumed: After a resume within an epoch, the value of ``read`` there, and how many batches a loop would leave
            out that skips those before the position once more; None otherwise.
    """

    __slots__ = ("around", "micro", "number", "outlook", "read", "resumed", "waited")

    def __init__(self) -> None:
        self.micro: Micro | None = None
        self.waited = 0.0
        self.read = self.number = 0
        self.around: Callable[[bool], AbstractContextManager[Any]] | None = None
        self.outlook: Outlook | None = None
        self.resumed: tuple[int, int] | None = None


_DEFINED_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE


@dataclass(slots=True, frozen=True)
class Micro:
    """Metadata of one micro-batch.

    Attributes:
        samples: Number of samples of this process; 1 if unknown, 0 for a placeholder that keeps the processes in step.
        scale: Factor by which the mean loss of the micro-batch is multiplied, so that the gradient of the step is the
            mean over all samples of the group.
        last: Whether the micro-batch is the last of its group.
        group_samples: Number of samples in the group, over all processes.
        everyone: Number of samples in the micro-batch, over all processes.
        number: Index of the micro-batch in its group, from 0.
        group_scale: Sum of ``scale`` over the group.
    """

    samples: int
    scale: float
    last: bool
    group_samples: int
    everyone: int
    number: int
    group_scale: float


def share(count: int, rank: int, size: int) -> slice:
    """Return the slice of ``count`` samples that belongs to process ``rank`` of ``size``.

    Shares are contiguous, their sizes differ by at most one, and no share is larger than rank zero's.
    """
    base, extra = divmod(count, size)
    start = rank * base + min(rank, extra)
    return slice(start, start + base + (rank < extra))


def split_size(batch_size: int | None, size: int, unknown: str) -> int:
    """Return each process's number of samples in a batch that ``split_batches`` splits over ``size`` processes.

    ``unknown`` describes what the loader has instead of a batch size, if ``batch_size`` is None.

    Raises:
        ValueError: If the batch cannot be divided.
    """
    if batch_size is None or batch_size % size:
        actual = unknown if batch_size is None else f"batch_size={batch_size}"
        fix = "Pass a DataLoader with batch_size" if batch_size is None else "Change batch_size"
        raise ValueError(
            f"split_batches=True splits each batch over {size} processes, so DataLoader(batch_size=...) must be a "
            f"multiple of {size}, but this dataloader has {actual}. {fix}, or remove split_batches."
        )
    return batch_size // size


def avoid_rewind(iterator: Iterator[Any]) -> Iterator[Any]:
    """Wrap an iterator, unless it is built-in, so that its own ``__iter__`` is not called again.

    A user-defined iterator whose ``__iter__`` rewinds it would start again in ``for`` or ``itertools.islice``.
    """
    return _iter_without_rewind(iterator) if type(iterator).__flags__ & _DEFINED_IN_PYTHON else iterator


def _iter_without_rewind(iterator: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


class GroupPlanner:
    """Planner of accumulation groups, each of which forms one optimizer step, with exact weights for its micro-batches.

    If each rank reads its own data, the attributes ``rank`` and ``size`` are 0 and 1 on all ranks. With several
    ranks, ``shares`` then counts the samples over all ranks.

    With a ``tree``, each rank plans whole micro-batches, of which it reads its own, so ``rank`` and ``size`` are 0 and
    1 too.

    Attributes:
        accumulate: Function that returns the number of micro-batches of a group, given its index in the iteration.
            Groups are planned before the steps of earlier ones, because workers read ahead.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        accumulate: Callable[[int], int],
        presharded: bool = False,
        tree: FixedTree | None = None,
    ) -> None:
        self.world_rank = rank
        self.world_size = size
        self.accumulate = accumulate
        self.shares: RankShares | None = None
        self.tree = tree
        self.rank, self.size = (rank, size) if tree is None else (0, 1)
        if tree is not None:
            self.accumulate = lambda _: tree.leaves
        if presharded and size > 1:
            self.disable_sharding()

    def disable_sharding(self) -> None:
        """Disable sharding, because each rank reads its own data."""
        self.rank, self.size = 0, 1
        self.shares = RankShares(self.world_size)

    def plan(self, sizes: list[tuple[int, int]]) -> list[Micro]:
        """Return the metadata of the micro-batches of one group.

        ``sizes`` contains (samples of this process, samples of all processes) for each micro-batch.
        """
        total = 0
        for _, everyone in sizes:
            total += everyone
        # Gradients are averaged over the ranks, hence the factor world size; every sample then has the weight 1 /
        # total.
        scales = [self.world_size * samples / total if total else 0.0 for samples, _ in sizes]
        whole = 0.0
        for scale in scales:  # not `sum`, which rounds differently from a loop that adds them up
            whole += scale
        last = len(sizes) - 1
        return [
            Micro(samples, scale, number == last, total, everyone, number, whole)
            for number, ((samples, everyone), scale) in enumerate(zip(sizes, scales, strict=True))
        ]

    def plan_leaves(self, sizes: list[int]) -> list[tuple[int | None, Micro]]:
        """Return the metadata of this rank's micro-batches of one step in a `FixedTree`, each with its number.

        ``sizes`` contains the number of samples of each micro-batch of the step. The number of a placeholder is None.
        The gradients are summed over the ranks, so the weights do not depend on the number of ranks.
        """
        assert self.tree is not None
        rows = self.tree.cut(len(sizes))
        own = [row[self.world_rank] for row in rows]
        samples = [0 if leaf is None else sizes[leaf] for leaf in own]
        everyone = [sum(sizes[leaf] for leaf in row if leaf is not None) for row in rows]
        total, last = sum(sizes), len(rows) - 1
        scales = [count / total if total else 0.0 for count in samples]
        whole = 0.0
        for scale in scales:
            whole += scale
        micros = [
            Micro(samples[number], scale, number == last, total, everyone[number], number, whole)
            for number, scale in enumerate(scales)
        ]
        return list(zip(own, micros, strict=True))
