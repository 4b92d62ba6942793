"""Position of a dataloader in its epochs. The dataloader and the reader of its batches share one object.

::

                        begin                      set_epoch
        BETWEEN ---------------------> RUNNING ----------------> RENUMBERED
         |   ^                         |     ^                       |
         |   +--------- end -----------+     |                       |
         |   +--------- end (the number stays) ----------------------+
         |   |                               |
    load |   +--- end ---+                   | start
         v               |                   |
        LOADED ----------+-------------------+
         |
         | finish_epoch
         v
        FINISHED ------> like BETWEEN, but a loop may still ask for the epoch that has ended

``begin`` happens when the order of the epoch is drawn: with the first batch, and not when ``iter`` is called, because
other dataloaders may draw in between. An epoch that a loop leaves early is in RUNNING until the next iteration ends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


class Phase(Enum):
    """Phase of a dataloader. Checkpoints contain ``order`` instead, which is set in the middle three."""

    BETWEEN = auto()  # the next iteration begins an epoch
    LOADED = auto()  # a checkpoint was loaded whose epoch has not been continued yet
    RUNNING = auto()  # the order was drawn
    RENUMBERED = auto()  # as RUNNING; `set_epoch` has set the number of the next epoch
    FINISHED = auto()  # as BETWEEN; the loaded epoch had no batch left, and nothing was read since


SAVED = ("epoch", "samples", "batches", "order", "started")
"""Attributes that checkpoints contain, under the same names."""


@dataclass(slots=True)
class EpochPosition:
    """Position of a dataloader in its epochs.

    Attributes:
        epoch: Number of the epoch, from 0.
        samples: Number of samples that all processes together have read or skipped in this epoch. A batch of unknown
            size counts as 1.
        batches: Number of batches that this process has read or skipped in this epoch.
        order: RNG state that the order of the epoch is drawn from; None between epochs. If it is set before an epoch
            begins, the order is drawn from this state again.
        started: Whether persistent workers run, in this process or in the run whose checkpoint was loaded.
        items_ahead: Number of the sampler's items between ``batches``, in the current world size, and the position that
            was saved in another world size.
        passing: Number of batches to skip when the next iteration starts.
        phase: Current phase; see `Phase`.
    """

    epoch: int = 0
    samples: int = 0
    batches: int = 0
    order: dict[str, Any] | None = None
    started: bool = False
    items_ahead: int = 0
    passing: int = 0
    phase: Phase = Phase.BETWEEN

    def begin(self, order: dict[str, Any]) -> None:
        """Begin the epoch whose order is drawn from ``order``."""
        self.order, self.phase = order, Phase.RUNNING

    def end(self) -> None:
        """End the epoch, if one has begun."""
        if self.order is not None:
            self.epoch += 1
            self.order, self.phase = None, Phase.BETWEEN
            self.rewind()

    def rewind(self) -> None:
        """Return to the first batch of the epoch."""
        self.samples = self.batches = self.items_ahead = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the attributes `SAVED`."""
        self.rewind()
        for name in SAVED:
            setattr(self, name, state[name])
        self.phase = Phase.BETWEEN if self.order is None else Phase.LOADED
