"""Transfer of batches to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch

from ...common.messages import name_type, read_text, warn
from ...strategies import Precision, apply_nested


def move_data_to_device(batch: Any, device: torch.device | str) -> Any:
    """Return ``batch`` with its tensors on ``device``.

    Tensors and other objects with a ``.to(device)`` method are moved, including those inside mappings, sequences and
    dataclasses. All other objects are left unchanged. The values can be read as soon as this function returns, even
    after a copy to the host.

    Args:
        batch: A tensor or a nested structure (dict, list, tuple) of tensors.
        device: The target device.

    Raises:
        TypeError: If the ``.to`` method of an object in the batch raises a ``TypeError``.
    """
    # A non-blocking copy to the host returns before its values are there, and one to MPS may read a host tensor that
    # was freed in the meantime (https://github.com/pytorch/pytorch/issues/83015).
    target = torch.device(device)
    non_blocking = target.type not in ("cpu", "mps")
    copier: _HostCopier | None = None  # created when it is needed

    def to(item: Any) -> Any:
        nonlocal copier
        try:
            if isinstance(item, torch.Tensor):
                if target.type == "cuda" and _can_pin(item):
                    copier = copier or _begin_copies(target)
                    return copier(item)
                return item.to(device, non_blocking=non_blocking)
            moved = item.to(device)
        except TypeError as error:
            raise TypeError(
                f"{name_type(item)} in the batch cannot be moved to {device}: {read_text(error)}. Give "
                f"{type(item).__name__} a `to(device)` method that returns the moved object, or "
                "override `transfer_batch_to_device`."
            ) from error
        return item if moved is None else moved

    return apply_nested(batch, _Movable, to)


class _HostCopier:
    """Asynchronous copier of a batch's tensors from the host to a GPU.

    The next batch is not copied during a step: reading it early may draw random numbers, and a checkpoint that is saved
    after the step would contain the resulting RNG state.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pins = True
        self._stream: torch.cuda.Stream | None = None
        self._handed_out: deque[torch.cuda.Event] = deque()  # one per batch
        self._is_first = True

    def begin_batch(self) -> _HostCopier:
        """Start a batch, to which all tensors up to the next call belong, and return the copier."""
        self._is_first = True
        return self

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = self._pin(tensor)
        if pinned is None:
            return tensor.to(self._device, non_blocking=True)
        if tensor.nbytes < _LARGE:
            return pinned.to(self._device, non_blocking=True)
        return self._copy_in_stream(pinned)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor in pinned memory; None if memory cannot be pinned."""
        if not self._pins:
            return None
        try:
            return tensor if tensor.is_pinned() else tensor.pin_memory()
        except RuntimeError as error:
            self._pins = False
            first_line = str(error).partition("\n")[0]
            warn(
                f"host memory can't be pinned ({first_line}), so the host waits for each copy of a batch to the device."
            )
            return None

    def _copy_in_stream(self, pinned: torch.Tensor) -> torch.Tensor:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        if self._is_first:
            self._is_first = False
            self._handed_out.append(current.record_event(torch.cuda.Event(blocking=True)))
            if len(self._handed_out) > _AHEAD:
                self._handed_out.popleft().synchronize()
        with torch.cuda.stream(self._stream):
            copied = pinned.to(self._device, non_blocking=True)
        current.wait_stream(self._stream)
        copied.record_stream(current)  # its work must be done before the memory is used for another batch
        return copied


def _can_pin(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and not tensor.requires_grad
        and tensor.numel() > 0
        and (tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last))
    )


_LARGE = 1 << 20  # bytes; a smaller copy takes less time than synchronizing two streams
_AHEAD = 2

_make_copier = cache(_HostCopier)


def _begin_copies(device: torch.device) -> _HostCopier:
    index = torch.cuda.current_device() if device.index is None else device.index
    return _make_copier(torch.device("cuda", index)).begin_batch()


@runtime_checkable
class _Movable(Protocol):
    """Any object with a ``.to`` method."""

    def to(self, device: Any) -> Any:
        """Return the object on ``device``."""


def choose_mover(device: torch.device, precision: Precision) -> Callable[[Any], Any] | None:
    """Return the function that moves each batch to the model's device and casts it; None if neither is needed."""
    if device.type == "cpu":
        return None if precision.storage is None else precision.cast
    if precision.storage is None:
        return lambda batch: move_data_to_device(batch, device)
    return lambda batch: precision.cast(move_data_to_device(batch, device))
