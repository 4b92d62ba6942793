"""List of the running dataloaders that no `Accelerator` prepared, maintained by `treadle.compat.sharded_loaders`."""

from __future__ import annotations

import weakref
from typing import Any

_running_loaders: list[weakref.ref[Any]] = []  # weak references, because a loop that is left early does not report it


def add_running_loader(loader: Any) -> None:
    """Add ``loader`` to the list as the innermost loader. It must have ``end_of_dataloader`` and ``remainder``."""
    _running_loaders.append(weakref.ref(loader))


def remove_running_loader(loader: Any) -> None:
    """Remove ``loader`` from the list."""
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
