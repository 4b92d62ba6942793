"""How far the run is: a few whole numbers, valid between optimizer steps."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(slots=True)
class Progress:
    """Counters of a run. Checkpoints are made between optimizer steps only, so these are all there is.

    Attributes:
        epoch: epochs completed.
        step: optimizer steps that really happened.
        batch: micro-batches of the current epoch, of this process.
        batches: micro-batches of all epochs, of this process.
        samples: samples trained on, over all processes.
        validated: what ``batches`` was at the newest validation, or when one would have been due.
        skipped: optimizer steps that a float16 overflow or a non-finite loss prevented.
        seconds: time spent in training, for ``max_time``.
        loaded: the epoch in which the loaders were asked for last.
        ended: what ``step`` was when a step's end was worked off last: validation, logging, checkpoints.
        closed: the epoch's last step is over, its validation and its schedulers too.
        closing: the epoch is complete and its end is being worked off; a checkpoint from here begins the next one.
        within: a step's micro-batches are being worked on; no checkpoint can be made.
        unended: the last step is taken, but its end, with its validation, is still to come.
    """

    epoch: int = 0
    step: int = 0
    batch: int = 0
    batches: int = 0
    samples: int = 0
    validated: int = 0
    skipped: int = 0
    seconds: float = 0.0
    loaded: int = 0
    ended: int = 0
    closed: bool = False
    closing: bool = False
    within: bool = False
    unended: bool = False

    def next_epoch(self) -> None:
        """The epoch is behind us."""
        self.epoch += 1
        self.restart_epoch()

    def restart_epoch(self) -> None:
        """Count the epoch's micro-batches from the beginning."""
        self.batch = 0
        self.closed = self.closing = self.within = self.unended = False

    def recount(self, batch: int) -> None:
        """The epoch goes on with another number of processes, so what is behind us is ``batch`` micro-batches."""
        more = batch - self.batch
        self.batch, self.batches, self.validated = batch, self.batches + more, self.validated + more

    def state_dict(self) -> dict[str, Any]:
        """All counters by name."""
        state = replace(self)
        if state.closing:
            state.next_epoch()
        return asdict(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        for name, value in state_dict.items():
            setattr(self, name, value)
