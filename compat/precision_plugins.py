"""Precisions as Lightning's plugins, such as ``Trainer(plugins=DoublePrecision())``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import torch

from ..strategies import Precision

__all__ = ["DoublePrecision", "FSDPPrecision", "HalfPrecision", "MixedPrecision"]


class _Named(Precision):
    """Precision that is built from its name."""

    names: tuple[str, ...] = ()
    scaler: Any = None  # that of a run is `trainer.precision_plugin.scaler`

    def __init__(self, precision: str, scaler: Any = None) -> None:
        if precision not in self.names:
            raise ValueError(f"{type(self).__name__}: precision={precision!r} is not one of {', '.join(self.names)}.")
        if scaler is not None:
            raise ValueError(
                f"{type(self).__name__}: scaler={type(scaler).__name__}(...) is not supported, because a run creates "
                "its own gradient scaler. Remove scaler, or use an Accelerator with "
                "kwargs_handlers=[GradScalerKwargs(init_scale=...)]."
            )
        for field in fields(Precision):
            object.__setattr__(self, field.name, getattr(Precision.parse(precision), field.name))

    @property
    def precision(self) -> str:
        """Name of the precision."""
        return self.name

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Convert a module's floating-point tensors to ``storage`` in place, if it is set, and return the module."""
        return self.cast_module(module)

    def convert_input(self, data: Any) -> Any:
        """Return a batch with its floating-point tensors in the dtype ``storage``, if it is set."""
        return self.cast(data)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which ``storage``, unless it is None, is the default dtype of new tensors."""
        return nullcontext() if self.storage is None else Precision.context(self, torch.device("cpu")) or nullcontext()

    module_init_context = tensor_init_context


class MixedPrecision(_Named):
    """Precision that keeps the dtype of the weights, usually float32, and computes in a 16-bit format with autocast.

    Args:
        precision: ``"16-mixed"`` or ``"bf16-mixed"``.
        device: Device for `forward_context`, such as ``"cuda"``. The Trainer ignores it.
        scaler: Must be None, because a run creates its own gradient scaler.
    """

    names = ("16-mixed", "bf16-mixed")

    def __init__(self, precision: str, device: str, scaler: Any = None) -> None:
        super().__init__(precision, scaler)
        object.__setattr__(self, "device", device)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the autocast context for ``device``."""
        return self.context(torch.device(self.device)) or nullcontext()  # type: ignore[attr-defined]

    autocast_context_manager = forward_context


class HalfPrecision(_Named):
    """Precision with weights and computations in a 16-bit format.

    Args:
        precision: ``"16-true"`` (default) or ``"bf16-true"``.
    """

    names = ("bf16-true", "16-true")

    def __init__(self, precision: str = "16-true") -> None:
        super().__init__(precision)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new floating-point tensors are 16-bit by default."""
        return self.tensor_init_context()


class DoublePrecision(_Named):
    """Precision with weights and computations in float64."""

    names = ("64-true",)

    def __init__(self) -> None:
        super().__init__("64-true")

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new floating-point tensors are float64 by default."""
        return self.tensor_init_context()


class FSDPPrecision(_Named):
    """Precision for sharded models.

    Args:
        precision: ``"32-true"``, ``"16-true"``, ``"bf16-true"``, ``"16-mixed"`` or ``"bf16-mixed"``.
        scaler: Must be None, because a run creates its own gradient scaler.
    """

    names = ("32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")

    def __init__(self, precision: str, scaler: Any = None) -> None:
        super().__init__(precision, scaler)
