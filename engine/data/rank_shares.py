"""Sample counts of micro-batches over all ranks, for runs in which each rank reads its own data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from ...common.messages import announce, format_count, named_ranks
from ...strategies import World


@dataclass(slots=True, frozen=True)
class Share:
    """Length of one rank's data.

    Attributes:
        samples: Number of samples in an epoch; None if unknown, or if the batch sizes do not follow from it.
        batch_size: Number of samples in a full batch of this rank; 1 if unknown.
        batches: Number of batches in an epoch; None if unknown.
        may_read_ahead: Whether batches may be read before the loop requests them.
    """

    samples: int | None
    batch_size: int
    batches: int | None
    may_read_ahead: bool = False


class Outlook:
    """Votes on an upcoming group of micro-batches. Each rank reports a full share, the end of its data, or neither.

    If every rank reports one of the first two, the number of samples in the group follows from the votes.

    Attributes:
        width: Number of micro-batches in the group.
        is_full: Whether this rank has read all micro-batches of the group, and each of them is a full batch.
        has_ended: Whether this rank has no data left for the group.
    """

    __slots__ = ("_ended", "_full", "_voters", "has_ended", "is_full", "width")

    def __init__(self, width: int, is_full: bool, has_ended: bool) -> None:
        self.width = width
        self.is_full = is_full
        self.has_ended = has_ended
        self._full = self._ended = self._voters = 0

    def store_votes(self, full: float, ended: float, voters: int) -> None:
        """Store the number of ranks that reported each of the two states, and the number of all ranks that voted."""
        self._full, self._ended, self._voters = round(full), round(ended), voters

    @property
    def has_votes(self) -> bool:
        """True once the summed votes are stored."""
        return self._voters > 0

    def count_full(self, ranks: int) -> int | None:
        """Return the number of data ranks that have a full share; None if the votes do not determine it.

        ``ranks`` is the number of data ranks, each of which has its own share of the data. With tensor parallelism,
        several voters read the same share.
        """
        if not self._voters or self._full + self._ended != self._voters:
            return None
        return self._full * ranks // self._voters


class RankShares:
    """Calculator of each micro-batch's number of samples over all ranks, if every rank reads its own data.

    All ranks stay in step until the last one has read its data. A rank without a batch takes part with weight zero.

    If the sizes of the batches follow from the lengths of the data, the lengths are exchanged once. Otherwise the ranks
    vote on an upcoming group along with the gradients (see `Outlook`), or add up their sample counts on the host.

    Attributes:
        size: The world size.
        depth: Number of groups of micro-batches that every rank reads ahead of the loop.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._world: World | None = None
        self._shares: list[Share] | None = None
        # Number of ranks with each share, if all sizes follow from the lengths.
        self._alike: Counter[Share] | None = None
        self._announced = False
        self._batch_size = 0
        self.depth = 0

    def exchange_lengths(self, share: Share, world: World, source: str) -> None:
        """Exchange the lengths of the ranks' data. Call this method on all ranks.

        Raises:
            ValueError: On every rank, if the lengths show that only some ranks have no data.
        """
        shares = world.gather_objects(share)
        self._world = world
        counts = [share.batches for share in shares]
        if any(count == 0 for count in counts) and any(counts):
            raise _make_empty_error([rank for rank, count in enumerate(counts) if count == 0], source)
        self._shares = shares
        self._alike = Counter(shares) if all(share.samples is not None for share in shares) else None
        self._batch_size = share.batch_size
        if all(other.may_read_ahead and other.batch_size == share.batch_size for other in shares):
            self.depth = 1 if world.device.type == "cpu" else 2  # on other devices votes are read one step later
        defined_counts = [count for count in counts if count is not None]
        if len(defined_counts) == self.size and len(set(defined_counts)) > 1:
            by_rank = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
            self._announce(f"each rank reads its own data, and the number of batches differs ({by_rank})")

    @property
    def batches(self) -> int | None:
        """Number of batches in an epoch, on the rank that has the most; None if any rank's number is unknown."""
        if self._shares is None:
            return None
        counts = [share.batches for share in self._shares]
        defined_counts = [count for count in counts if count is not None]
        return max(defined_counts) if len(defined_counts) == len(counts) else None

    def totals(
        self, first: int, local_samples: list[int], width: int, source: str, outlook: Outlook | None = None
    ) -> list[int]:
        """Return the sample counts of the next micro-batches over all ranks; empty once all data has been read.

        Args:
            first: Number of micro-batches of the epoch before these.
            local_samples: Number of samples of each of this rank's next micro-batches.
            width: Number of micro-batches in a full group.
            source: The name of the source, for errors.
            outlook: The votes of the ranks on these micro-batches; None without votes.

        Raises:
            ValueError: On every rank, if only some ranks have no data.
        """
        if self._world is None:  # no rank was asked
            return [self.size * samples for samples in local_samples]
        if self._alike is not None:
            alike = self._alike.items()
            sums = [sum(ranks * _count_samples(share, first + n) for share, ranks in alike) for n in range(width)]
            return sums[: sums.index(0)] if 0 in sums else sums
        active = None if outlook is None else outlook.count_full(self.size)
        if active is None:
            sums, active = self._exchange(local_samples, width, self._world)
        else:
            sums = [active * self._batch_size] * width
        if 0 < active < self.size and not (first and self._announced):  # both values are the same on all ranks
            every = self._world.gather_objects(bool(local_samples))
            ended = [rank for rank, some in enumerate(every) if not some]
            if first == 0:
                raise _make_empty_error(ended, source)
            # Within a group of micro-batches, each rank may have ended after a different one.
            last = f"after {'at most ' * (width > 1)}{format_count(first, 'batch')}"
            self._announce(f"{named_ranks(ended)} of {self.size} ran out of data {last}")
        return sums[: sums.index(0)] if 0 in sums else sums

    @staticmethod
    def _exchange(local_samples: list[int], width: int, world: World) -> tuple[list[int], int]:
        packed = torch.tensor([*local_samples, *[0] * (width - len(local_samples)), bool(local_samples)], device="cpu")
        *sums, active = world.all_reduce(packed).tolist()
        return sums, active

    def _announce(self, event: str) -> None:
        if not self._announced:
            self._announced = True
            announce(
                f"{event}. Ranks without data contribute with weight 0 until all ranks are done, so no sample is lost."
            )


def compare_across_ranks(first: str, source: str, kind: str, world: World) -> bool:
    """Compare a digest of a source's first items across ranks, and log a message if all differ. Call it on all ranks.

    Returns:
        True if the first items are the same on all ranks; False if they differ on every rank.

    Raises:
        ValueError: On every rank, if the first items are the same on only some ranks.
    """
    marks = world.gather_objects(first)
    if len(set(marks)) == 1:
        return True
    if len(set(marks)) < world.size:
        groups = [[rank for rank, mark in enumerate(marks) if mark == common] for common in dict.fromkeys(marks)]
        shared = [named_ranks(ranks) for ranks in groups if len(ranks) > 1]
        holders = f", but different {kind} on ".join(
            [*shared, "the other ranks"] if len(shared) < len(groups) else shared
        )
        raise ValueError(
            f"{source} yields the same {kind} on {holders}, so it can neither be sharded nor used as each rank's own "
            f"data. Split it over all {world.size} ranks, or not at all."
        )
    announce(
        f"{source} yields different {kind} on each rank, so it is treated as already split by rank. Each rank trains "
        "on all of its own batches. If all ranks should read the same data, seed its generator. Treadle then shards "
        "the data."
    )
    return False


def _count_samples(share: Share, batch: int) -> int:
    assert share.samples is not None
    return min(max(0, share.samples - batch * share.batch_size), share.batch_size)


def _make_empty_error(ranks: list[int], source: str) -> ValueError:
    return ValueError(
        f"{source} yields no batch on {named_ranks(ranks)}, but every rank needs at least one. Split the data so that "
        "every rank gets some, or use fewer processes."
    )
