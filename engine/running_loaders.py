"""Loaders without an Accelerator that are being iterated; `treadle.compat.sharded_loaders` maintains the list.

If a loop reads from no prepared loader, an Accelerator uses the innermost of these loaders: a group of micro-batches
ends with the loader, and samples that the loader repeated to fill its last batch are not gathered twice.
"""

from __future__ import annotations

import weakref
from typing import Any

_running_loaders: list[weakref.ref[Any]] = []  # weak references, because a loop that is left early does not report it


def add_running_loader(loader: Any) -> None:
    """Add ``loader`` as the innermost one.

    Args:
        loader: An object with ``end_of_dataloader`` and ``remainder``.
    """
    _running_loaders.append(weakref.ref(loader))


def remove_running_loader(loader: Any) -> None:
    """Remove ``loader``, which is no longer iterated.

    Args:
        loader: The loader.
    """
    _running_loaders[:] = [reference for reference in _running_loaders if reference() is not loader]


def list_running_loaders() -> list[Any]:
    """Return the loaders that are being iterated, the innermost last."""
    return [loader for reference in _running_loaders if (loader := reference()) is not None]


def get_running_loader() -> Any:
    """Return the innermost loader that is being iterated, or None."""
    while _running_loaders:
        loader = _running_loaders[-1]()
        if loader is not None:
            return loader
        _running_loaders.pop()
    return None
