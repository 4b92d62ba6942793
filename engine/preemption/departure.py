"""Let all ranks leave a loop before the same batch, if the loop has no collective that could carry a vote.

The ranks may be at different batches, or wait for each other within one. A rank must not simply stop: a rank that is
ahead may need the others in a collective of its current batch. Therefore

1. the rank that wants to leave writes a request to the store;
2. each rank that reads it pledges not to begin the batch after its current one without a decision. A thread does this,
because the rank itself may be waiting for others;
3. rank zero decides on the furthest batch that was pledged, which no rank has begun. All ranks leave there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...strategies.distributed import Watchdog

_POLL = 0.005  # seconds
_FAR = 2**62

Position = tuple[int, int]
"""The number of a loop since the start, and of a batch in it."""


class _Round:
    """Messages since the beginning of one stage.

    Attributes:
        number: The number of the stage; the ranks go through the same stages.
        position: The batch that this rank is in, or about to begin.
        asked: Whether this rank wants to leave.
        limit: The batch before which this rank waits for the decision.
        decision: The batch before which all ranks leave.
    """

    def __init__(self) -> None:
        self.number = 0
        self.position: Position = (0, _FAR)
        self.asked = False
        self.limit: Position | None = None
        self.decision: Position | None = None

    def pledge(self) -> Position:
        """Stop this rank at a batch that it has not begun, and return that batch."""
        while True:
            loop, batch = self.position
            self.limit = (loop, batch + 1) if batch < _FAR else (loop + 1, 0)
            if self.position < self.limit:  # otherwise it has continued before it could see the limit
                return self.limit


class Departure:
    """Agreement of the ranks on the batch before which they leave a loop.

    Args:
        rank: The rank of this process.
        size: The world size.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._round = _Round()
        self._on_asked: Callable[[], None] = lambda: None

    def begin_stage(self, watchdog: Watchdog | None, on_asked: Callable[[], None]) -> None:
        """Begin a stage, and discard earlier requests. Must be called on all ranks.

        Args:
            watchdog: Its thread accesses the store; without a watchdog, several ranks cannot leave a loop early.
            on_asked: Called by that thread when any rank has requested to leave.
        """
        self._round, self._on_asked = _Round(), on_asked
        if watchdog is not None:
            self._round.number = watchdog.run_errand(self.exchange)

    def ask(self) -> None:
        """Request that all ranks leave. It may be called at any time, from a signal handler."""
        self._round.asked = True

    def begin_loop(self) -> None:
        """Begin a loop; all ranks go through the same loops."""
        self._round.position = (self._round.position[0] + 1, 0)

    def end_loop(self) -> None:
        """End a loop, all of whose batches are done."""
        self._round.position = (self._round.position[0], _FAR)

    def must_leave(self, batch: int) -> bool:
        """Return whether all ranks leave before this batch of the loop. It may wait for the other ranks, once.

        Args:
            batch: The number of the batch.
        """
        state = self._round
        state.position = position = (state.position[0], batch)
        if self._size == 1:
            return state.asked
        if state.limit is None or position < state.limit:
            return False
        while state.decision is None:
            time.sleep(_POLL)
        state.limit = state.decision
        return position >= state.decision

    def stay(self) -> None:
        """Cancel the request in this stage. Must be called on all ranks, at the point where they would have left."""
        self._round.asked, self._round.limit = False, (_FAR, 0)
        self._round.decision = self._round.limit

    def exchange(self, store: Any) -> bool:
        """Exchange requests and pledges; a thread calls it periodically.

        Args:
            store: Torch's store of the process group.

        Returns:
            Whether it has to be called again.
        """
        state = self._round
        asking, deciding = f"leave {state.number}", f"leave {state.number} at"
        if state.decision is not None or not state.number:
            return False
        if state.limit is None:
            if state.asked:
                store.set(asking, "")
            elif not store.check([asking]):
                return False
            self._on_asked()
            store.set(f"{asking}, rank {self._rank}", json.dumps(state.pledge()))
        if self._rank == 0:
            pledges = [f"{asking}, rank {rank}" for rank in range(self._size)]
            if store.check(pledges):
                store.set(deciding, json.dumps(max(json.loads(store.get(pledge)) for pledge in pledges)))
        if store.check([deciding]):
            state.decision = tuple(json.loads(store.get(deciding)))
        return state.decision is None
