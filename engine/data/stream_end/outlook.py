"""A group of micro-batches that is still to come, where each rank reads a stream of its own."""

from __future__ import annotations


class Outlook:
    """Votes on a coming group of micro-batches: is every rank's part of it full, or has the rank's data ended?

    The votes ride in the gradient reduction of an earlier group. Where each rank's part is one of the two, the samples
    of the group follow from how many ranks voted for which, and nothing has to be exchanged for it.

    Args:
        width: micro-batches in the group.
        is_full: this rank has read all of them, each with the samples of a full batch.
        has_ended: this rank has no data left for the group.
    """

    __slots__ = ("_ended", "_full", "_voters", "has_ended", "is_full", "width")

    def __init__(self, width: int, is_full: bool, has_ended: bool) -> None:
        self.width = width
        self.is_full = is_full
        self.has_ended = has_ended
        self._full = self._ended = self._voters = 0

    def settle(self, full: float, ended: float, voters: int) -> None:
        """Note the summed votes.

        Args:
            full: how many ranks voted that their part is full.
            ended: how many voted that their data has ended.
            voters: how many ranks voted.
        """
        self._full, self._ended, self._voters = round(full), round(ended), voters

    @property
    def is_settled(self) -> bool:
        """Whether the votes were read."""
        return self._voters > 0

    def count_full(self, ranks: int) -> int | None:
        """Return how many of the ranks that share the data have a full part; None where that does not say it all.

        Args:
            ranks: how many share the data; several voters may read the same share of it, as under tensor parallelism.
        """
        if not self._voters or self._full + self._ended != self._voters:
            return None
        return self._full * ranks // self._voters
