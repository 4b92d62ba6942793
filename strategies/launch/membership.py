"""Machines of a run, as read from torch's rendezvous."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, _RendezvousExitOp

# Seconds that machines that meet again wait for more machines. They lost each other at the same time, whereas machines
# that meet for the first time may be started half a minute apart (torch's default for both, which --rdzv-conf changes).
_LAST_CALL = timedelta(seconds=5)
_LEAVE = 5.0  # seconds


class Membership:
    """Machines that take part in a run, wait to join it, or have left it.

    Changes are reported only if the rendezvous is a `DynamicRendezvousHandler` of torch, as with the c10d backend.
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler if isinstance(handler, DynamicRendezvousHandler) else None
        self._size = 0

    def begin_round(self) -> None:
        """Prepare the first or a later rendezvous of the run, so that torch creates a new store for the ranks."""
        if self._handler is None:
            return
        # torch (2.4 to 2.13) keeps the ranks' store over restarts, with the keys of the killed ranks, and on some
        # machines with the address of a machine that has left. With None it is created again, and all machines see the
        # new one.
        self._handler._bootstrap_store_info = self._handler._shared_tcp_store_server = None
        self._handler.num_nodes_waiting()  # this requests the state from the store
        state, timeout = self._handler._state_holder.state, self._handler.settings.timeout
        if (state.complete or state.round > 0) and timeout.last_call > _LAST_CALL:
            timeout._set_timeouts(last_call=_LAST_CALL)

    def end_round(self, size: int) -> None:
        """Record the number of machines that took part in the completed rendezvous."""
        self._size = size

    def look(self) -> tuple[bool, bool]:
        """Return whether a machine has left the run, and whether another one is waiting to join."""
        if self._handler is None:
            return False, False
        waiting = self._handler.num_nodes_waiting()
        present = len(self._handler._state_holder.state.participants)
        # A machine that is alone and was stopped for a while has no information about itself.
        return self._size > 1 and present < self._size, waiting > 0

    def leave(self) -> None:
        """Report immediately that this machine leaves, so that the other machines need not wait for a timeout."""
        if self._handler is not None:
            self._handler._stop_heartbeats()
            with contextlib.suppress(RendezvousError):  # the store has ended, or does not answer in time
                self._handler._op_executor.run(_RendezvousExitOp(), time.monotonic() + _LEAVE)
