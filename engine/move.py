"""Batches to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from ..strategies import Precision


def move_data_to_device(batch: Any, device: torch.device | str) -> Any:
    """Return ``batch`` with every tensor on ``device``.

    Collections, dataclasses and anything else with a ``.to(device)`` are followed.

    Raises:
        TypeError: if something in the batch has a ``.to`` that does not take a device.
    """

    def to(item: Any) -> Any:
        try:
            # A pinned host tensor is copied while the device still computes.
            if isinstance(item, torch.Tensor):
                return item.to(device, non_blocking=True)
            moved = item.to(device)
        except TypeError as error:
            raise TypeError(
                f"a {type(item).__name__} in the batch can not be moved to {device}: {error}. Give it a "
                "`to(device)` method that returns it moved, or override `transfer_batch_to_device`."
            ) from error
        return item if moved is None else moved

    return apply_to_collection(batch, _Movable, to)


@runtime_checkable
class _Movable(Protocol):
    """Whatever has a ``.to``."""

    def to(self, device: Any) -> Any:
        """Return it on ``device``."""


def mover(device: torch.device, precision: Precision) -> Callable[[Any], Any] | None:
    """What to apply to each batch so that the model can take it; None where that is nothing.

    A CPU batch for a CPU model needs nothing, and then costs nothing.
    """
    if device.type == "cpu":
        return None if precision.storage is None else precision.cast
    if precision.storage is None:
        return lambda batch: move_data_to_device(batch, device)
    return lambda batch: precision.cast(move_data_to_device(batch, device))
