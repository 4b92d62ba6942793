"""Votes of the ranks on an upcoming group of micro-batches, for streams that each rank reads separately."""

from __future__ import annotations


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
