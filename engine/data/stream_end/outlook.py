"""Votes of the ranks on an upcoming group of micro-batches, for streams that each rank reads separately."""

from __future__ import annotations


class Outlook:
    """Votes on an upcoming group of micro-batches: each rank states whether its share is full or its data has ended.

    If every rank casts one of these two votes, the number of samples in the group follows from the counts of votes.

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
        """Store the votes for each of the two states, summed over the ranks, and the number of ranks that voted."""
        self._full, self._ended, self._voters = round(full), round(ended), voters

    @property
    def has_votes(self) -> bool:
        """True once the summed votes are stored."""
        return self._voters > 0

    def count_full(self, ranks: int) -> int | None:
        """Return the number of data ranks that have a full share; None if the votes do not determine it.

        ``ranks`` counts the shares of the data. With tensor parallelism, several voters read the same share.
        """
        if not self._voters or self._full + self._ended != self._voters:
            return None
        return self._full * ranks // self._voters
