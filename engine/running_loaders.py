"""List of the unprepared loaders that are being iterated, which `treadle.compat.sharded_loaders` maintains."""

from __future__ import annotations

import weakref
from typing import Any

_running_loaders: list[weakref.ref[Any]] = []  # weak references, because a loop that is left early does not report it


def add_running_loader(loader: Any) -> None:
    """Add ``loader``, which has ``end_of_dataloader`` and ``remainder``, to the list as the innermost loader."""
    _running_loaders.append(weakref.ref(loader))


def remove_running_loader(loader: Any) -> None:
    """Remove ``loader`` from the list, because it is no longer iterated."""
    _running_loaders[:] = [reference for reference in _running_loaders if reference() is not loader]


def list_running_loaders() -> list[Any]:
    """Return the loaders that are being iterated, from the outermost to the innermost."""
    return [loader for reference in _running_loaders if (loader := reference()) is not None]


def get_running_loader() -> Any:
    """Return the innermost loader that is being iterated, or None."""
    while _running_loaders:
        loader = _running_loaders[-1]()
        if loader is not None:
            return loader
        _running_loaders.pop()
    return None
