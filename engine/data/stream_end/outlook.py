"""Votes on a group of micro-batches that is still to come, if each rank reads its own stream."""

from __future__ import annotations


class Outlook:
    """Votes on an upcoming group of micro-batches: whether each rank's share is full, or the rank's data has ended.

    The votes are part of the gradient reduction of an earlier group. If one of the two holds for each rank, the samples
    of the group follow from the counts of votes, and nothing else has to be exchanged.

    Args:
        width: Micro-batches in the group.
        is_full: Whether this rank has read all micro-batches of the group, each with the samples of a full batch.
        has_ended: Whether this rank has no data left for the group.
    """

    __slots__ = ("_ended", "_full", "_voters", "has_ended", "is_full", "width")

    def __init__(self, width: int, is_full: bool, has_ended: bool) -> None:
        self.width = width
        self.is_full = is_full
        self.has_ended = has_ended
        self._full = self._ended = self._voters = 0

    def settle(self, full: float, ended: float, voters: int) -> None:
        """Store the summed votes.

        Args:
            full: The number of ranks that voted that their share is full.
            ended: The number of ranks that voted that their data has ended.
            voters: The number of ranks that voted.
        """
        self._full, self._ended, self._voters = round(full), round(ended), voters

    @property
    def is_settled(self) -> bool:
        """True once the votes were read."""
        return self._voters > 0

    def count_full(self, ranks: int) -> int | None:
        """Return the number of data-sharing ranks that have a full share; None if the votes do not determine it.

        Args:
            ranks: The number of ranks that share the data. Several voters may read the same share, as under tensor
                parallelism.
        """
        if not self._voters or self._full + self._ended != self._voters:
            return None
        return self._full * ranks // self._voters
