"""Precision of a run: the dtypes for storage and for computation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import torch
from torch import nn

from ..common.messages import nearest, warn
from .nested_data import apply_nested

# Lightning's names, then the short forms that Fabric and Accelerate accept.
_ALIASES: dict[Any, str] = {
    None: "32-true",
    "no": "32-true",
    32: "32-true",
    "32": "32-true",
    64: "64-true",
    "64": "64-true",
    16: "16-mixed",
    "16": "16-mixed",
    "fp16": "16-mixed",
    "bf16": "bf16-mixed",
    "fp8": "float8",
}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Precision of a run: the dtypes for storage and for computation.

    Args:
        name: One of ``32-true``, ``bf16-mixed``, ``16-mixed``, ``bf16-true``, ``16-true``, ``64-true``, ``float8``.
            Default: ``32-true``.
        storage: Dtype of floating-point parameters and inputs, or None to keep the user's dtypes.
        compute: Dtype in which autocast computes, or None for no autocast.
        scaled: Whether the loss is scaled to prevent underflow of float16 gradients.
        cached: Whether autocast caches the weights that it has cast.
        float8: Whether linear layers of suitable sizes compute matrix products in float8.

    Examples:
        >>> from treadle.strategies import Precision
        >>> Precision.parse("bf16").compute
        torch.bfloat16
    """

    name: str = "32-true"
    storage: torch.dtype | None = None
    compute: torch.dtype | None = None
    scaled: bool = False
    cached: bool = True
    float8: bool = False

    @classmethod
    def parse(cls, value: Any, argument: str = "precision") -> Precision:
        """Return the precision with the given name or alias.

        Args:
            value: The name, an alias such as ``"bf16"`` or ``16``, None for ``"32-true"``, or a `Precision`.
            argument: The argument's name, for the error message. Default: ``"precision"``.

        Raises:
            ValueError: If ``value`` is invalid.
        """
        if isinstance(value, Precision):
            return value
        can_be_name = value is None or isinstance(value, int | str)
        name = _ALIASES.get(value, value) if can_be_name else value
        if not can_be_name or name not in _PRECISIONS:
            names = [*_PRECISIONS, *(alias for alias in _ALIASES if isinstance(alias, str))]
            valid = ", ".join(_PRECISIONS)
            raise ValueError(f"{argument}={value!r} is not one of {valid}.{nearest(str(value), names)}")
        return _PRECISIONS[name]

    def replace(self, **fields: Any) -> Precision:
        """Return a copy with other values of some fields, also of a subclass whose constructor does not take them."""
        other = copy(self)
        vars(other).update(fields)
        return other

    def context(self, device: torch.device) -> AbstractContextManager[Any] | None:
        """Return a reusable context to run the model in, or None if the model needs none.

        Args:
            device: Device of the model.
        """
        if self.compute is not None:
            return _Autocast(device.type, self.compute, self.cached)
        return None if self.storage is None else _DefaultDtype(self.storage)

    def warn_if_emulated(self, device: torch.device) -> None:
        """Warn if the precision uses bfloat16 and the GPU only emulates it, which is many times slower.

        Args:
            device: Device of the model.
        """
        needs_bf16 = torch.bfloat16 in (self.compute, self.storage)
        if needs_bf16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            warn(
                f"precision={self.name!r}, but {torch.cuda.get_device_name(device)} does not support bfloat16 in "
                "hardware, so torch emulates bfloat16, which is many times slower. Use '16-mixed' or '32-true'."
            )

    def cast_module(self, module: nn.Module) -> nn.Module:
        """Cast a module's floating-point tensors to ``storage``, if it is set, in place, and return the module.

        As in ``Module.double``, complex tensors keep their dtype, and a torchmetrics metric keeps that of its state.

        Args:
            module: The user's module.
        """
        # Not with `Module.to(dtype=...)`, which also casts complex tensors and so drops their imaginary part.
        return module if self.storage is None else _CASTS[self.storage](module)

    def cast(self, batch: Any) -> Any:
        """Return ``batch`` with floating-point tensors cast to ``storage``, or unchanged if ``storage`` is None.

        Args:
            batch: A tensor or a nested structure of tensors, such as a dict or a list.
        """
        return batch if self.storage is None else cast_floating(batch, self.storage)


def cast_floating(data: Any, dtype: torch.dtype) -> Any:
    """Return ``data`` with its floating-point tensors cast to a dtype; see `apply_nested`."""
    return apply_nested(data, torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)


class _Autocast:
    """Reentrant ``torch.autocast``. Entering one of torch's instances twice leaves autocast enabled (torch 2.13)."""

    def __init__(self, device: str, dtype: torch.dtype, cached: bool = True) -> None:
        self.autocast = torch.autocast(device, dtype=dtype, cache_enabled=cached)
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1
        if self.depth == 1:
            self.autocast.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.depth -= 1
        if not self.depth:
            self.autocast.__exit__(*error)


class _DefaultDtype:
    """Context in which new floating-point tensors get the storage dtype by default, like the parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.before: list[torch.dtype] = []

    def __enter__(self) -> None:
        self.before.append(torch.get_default_dtype())
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before.pop())


_CASTS: dict[torch.dtype, Callable[[nn.Module], nn.Module]] = {
    torch.float16: methodcaller("half"),
    torch.bfloat16: methodcaller("bfloat16"),
    torch.float32: methodcaller("float"),
    torch.float64: methodcaller("double"),
}

_PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision(name="32-true"),
        Precision(name="bf16-mixed", compute=torch.bfloat16),
        Precision(name="16-mixed", compute=torch.float16, scaled=True),
        Precision(name="bf16-true", storage=torch.bfloat16),
        Precision(name="16-true", storage=torch.float16),
        Precision(name="64-true", storage=torch.float64),
        Precision(name="float8", compute=torch.bfloat16, float8=True),
    )
}
