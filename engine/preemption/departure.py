"""Protocol by which all ranks leave a loop before the same batch, without a collective in each step."""

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
"""Number of a loop since the start of the stage, and number of a batch in this loop."""


class _Round:
    """State of the agreement in one stage.

    Attributes:
        number: The number of the stage, which is the same on all ranks; 0 without a watchdog.
        position: The loop number and the batch number. Between loops, the batch number is `_FAR`.
        asked: Whether this rank has requested to leave.
        limit: The batch before which this rank waits for the decision, or None.
        decision: The batch before which all ranks leave, or None.
    """

    def __init__(self) -> None:
        self.number = 0
        self.position: Position = (0, _FAR)
        self.asked = False
        self.limit: Position | None = None
        self.decision: Position | None = None

    def pledge(self) -> Position:
        """Set the limit of this rank to a batch that it has not begun, and return this batch."""
        while True:
            loop, batch = self.position
            self.limit = (loop, batch + 1) if batch < _FAR else (loop + 1, 0)
            if self.position < self.limit:  # otherwise it has continued before it could see the limit
                return self.limit


class Departure:
    """Agreement of the ranks on the batch before which they leave a loop.

    A rank must not simply stop, because a rank that is further ahead may wait for it in a collective. Each rank that
    reads a request to leave therefore pledges not to begin its next batch without a decision, and rank zero chooses the
    furthest pledged batch.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._round = _Round()
        self._on_asked: Callable[[], None] = lambda: None

    def begin_stage(self, watchdog: Watchdog | None, on_asked: Callable[[], None]) -> None:
        """Begin a stage, and discard earlier requests. Must be called on all ranks.

        Without a watchdog, a run with several ranks cannot leave a loop early. ``on_asked`` is called in the watchdog's
        thread after any rank has requested to leave.
        """
        self._round, self._on_asked = _Round(), on_asked
        if watchdog is not None:
            self._round.number = watchdog.call_each_period(self.exchange)

    def ask(self) -> None:
        """Request that all ranks leave their loop before the same batch. A signal handler may call this."""
        self._round.asked = True

    def begin_loop(self) -> None:
        """Begin a loop. All ranks must run the same loops in the same order."""
        self._round.position = (self._round.position[0] + 1, 0)

    def end_loop(self) -> None:
        """End the current loop after its last batch."""
        self._round.position = (self._round.position[0], _FAR)

    def must_leave(self, batch: int) -> bool:
        """Return whether all ranks leave the loop before a batch. After a request, one call waits for the other ranks.

        ``batch`` is the number of the next batch within the loop.
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
        """Cancel the request to leave. Must be called on all ranks, at the batch before which they would leave.

        With several ranks, later requests in the same stage have no effect.
        """
        self._round.asked, self._round.limit = False, (_FAR, 0)
        self._round.decision = self._round.limit

    def exchange(self, store: Any) -> bool:
        """Exchange requests and pledges through the store. Return True if the decision is pending."""
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
