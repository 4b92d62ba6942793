"""The worker processes of a DataLoader that is being iterated: remembered, so that they can be ended."""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils.data import DataLoader


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
