"""The worker processes of a DataLoader: left alone by Ctrl-C, and ended by the process they work for."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader


class WorkerInit:
    """The ``worker_init_fn`` of a loader: the user's own, in a worker that ignores Ctrl-C.

    A terminal sends it to the workers too, and they may be needed for the step in progress. They end with their rank.

    Args:
        own: the user's function, if there is one.
    """

    def __init__(self, own: Callable[[int], Any] | None) -> None:
        self.own = own

    def __call__(self, worker_id: int) -> None:
        """Called in the worker."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.own is not None:
            self.own(worker_id)


def note_workers(view: DataLoader[Any], iterator: Any) -> Any:
    """Remember an iterator that has workers, for `end_workers`; returns it."""
    if hasattr(iterator, "_shutdown_workers"):
        view.__dict__["_treadle_iterator"] = weakref.ref(iterator)
    return iterator


def end_workers(view: DataLoader[Any]) -> None:
    """End the workers of the loader's latest iterator, whoever still refers to that."""
    iterator = view.__dict__.pop("_treadle_iterator", lambda: None)()
    if iterator is not None:
        iterator._shutdown_workers()  # private, as is its `__del__`'s call; in torch 2.6 to 2.13
