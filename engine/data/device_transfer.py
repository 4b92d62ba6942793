"""Batches to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from ...strategies import Precision


def move_data_to_device(batch: Any, device: torch.device | str) -> Any:
    """Return ``batch`` with every tensor on ``device``.

    Collections, dataclasses and anything else with a ``.to(device)`` are followed. The values can be read as soon as
    this returns, also those of a copy to the host.

    Raises:
        TypeError: if something in the batch has a ``.to`` that does not take a device.
    """
    # Into CUDA a pinned host tensor is copied while the device still computes, in stream order. A non-blocking copy to
    # the host returns before its values are there, and one to MPS may read a host tensor that was freed meanwhile
    # (https://github.com/pytorch/pytorch/issues/83015).
    non_blocking = torch.device(device).type not in ("cpu", "mps")

    def to(item: Any) -> Any:
        try:
            if isinstance(item, torch.Tensor):
                return item.to(device, non_blocking=non_blocking)
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


def choose_mover(device: torch.device, precision: Precision) -> Callable[[Any], Any] | None:
    """What to apply to each batch so that the model can take it; None where that is nothing.

    A CPU batch for a CPU model needs nothing, and then costs nothing.
    """
    if device.type == "cpu":
        return None if precision.storage is None else precision.cast
    if precision.storage is None:
        return lambda batch: move_data_to_device(batch, device)
    return lambda batch: precision.cast(move_data_to_device(batch, device))
