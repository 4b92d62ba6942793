"""Where a loop is, for all who take part in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from .rank_shares import RankShares
from .stream_end import Outlook


class Cursor:
    """Where the loop is. Shared by an Accelerator and its loaders.

    Attributes:
        micro: the micro-batch that was yielded last.
        waited: seconds in which this process has waited for batches.
        read: batches that this process has read.
        number: what ``read`` was with the current batch, which tells it from others with the same facts.
        around: makes the context to work on a batch in, told whether it is a short one that ends an epoch; or None.
        outlook: what the votes of the current group are to tell of a coming one; or None.
    """

    __slots__ = ("around", "micro", "number", "outlook", "read", "waited")

    def __init__(self) -> None:
        self.micro: Micro | None = None
        self.waited = 0.0
        self.read = self.number = 0
        self.around: Callable[[bool], AbstractContextManager[Any]] | None = None
        self.outlook: Outlook | None = None


_DEFINED_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE


@dataclass(slots=True, frozen=True)
class Micro:
    """The facts of one micro-batch that the loop needs.

    Attributes:
        samples: how many samples of it are this process's own; 0 for a stand-in that only keeps the processes in step.
        scale: what its mean loss is multiplied by, so that the step's gradient is the mean over the whole group.
        last: whether it ends its group, so that gradients are reduced and the optimizer steps.
        group_samples: samples of its whole group, over all processes.
        everyone: samples of it, over all processes.
        number: its place in its group, from 0.
        group_scale: the sum of ``scale`` over its group, in order.
    """

    samples: int
    scale: float
    last: bool
    group_samples: int
    everyone: int
    number: int
    group_scale: float


def share(count: int, rank: int, size: int) -> slice:
    """Process ``rank``'s part of ``count`` samples: contiguous, sizes differ by at most one, rank zero's never less."""
    base, extra = divmod(count, size)
    start = rank * base + min(rank, extra)
    return slice(start, start + base + (rank < extra))


def avoid_rewind(iterator: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator over the same items that ``iter`` leaves as it is.

    ``itertools.islice``, ``zip`` and ``for`` call ``iter`` on what they are given. A user-defined iterator whose
    ``__iter__`` rewinds it would begin anew with each call. Iterators written in C and generators don't.
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
    """Cuts a stream of batches into groups that form one optimizer step each, with exact weights.

    Args:
        rank: this process.
        size: world size.
        accumulate: returns how many micro-batches form a group; asked anew for each group.
        presharded: each rank reads data of its own, so that nothing is dealt.

    Attributes:
        shares: what all ranks hold, where each reads data of its own; else None.
    """

    def __init__(self, rank: int, size: int, accumulate: Callable[[], int], presharded: bool = False) -> None:
        self.world_rank = rank
        self.world_size = size
        self.accumulate = accumulate
        self.shares: RankShares | None = None
        self.rank, self.size = rank, size
        if presharded and size > 1:
            self.disable_sharding()

    def disable_sharding(self) -> None:
        """Deal nothing: each rank reads data of its own."""
        self.rank, self.size = 0, 1
        self.shares = RankShares(self.world_size)

    def plan(self, sizes: list[tuple[int, int]]) -> list[Micro]:
        """Return the facts of one group's micro-batches.

        Args:
            sizes: per micro-batch, (samples of this process, samples of all processes).
        """
        total = 0
        for _, everyone in sizes:
            total += everyone
        # Gradients are averaged over the ranks, hence the world size; every sample then weighs 1 / total.
        scales = [self.world_size * samples / total if total else 0.0 for samples, _ in sizes]
        whole = 0.0
        for scale in scales:  # not `sum`, which rounds otherwise than a loop that adds them up
            whole += scale
        last = len(sizes) - 1
        return [
            Micro(samples, scale, number == last, total, everyone, number, whole)
            for number, ((samples, everyone), scale) in enumerate(zip(sizes, scales, strict=True))
        ]
