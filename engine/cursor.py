"""Where a loop is, for all who take part in it."""

from __future__ import annotations

from .order import Micro


class Cursor:
    """Where the loop is. Shared by an Accelerator and its loaders.

    Attributes:
        micro: the micro-batch that was yielded last.
        waited: seconds in which this process has waited for batches.
    """

    __slots__ = ("micro", "waited")

    def __init__(self) -> None:
        self.micro: Micro | None = None
        self.waited = 0.0
