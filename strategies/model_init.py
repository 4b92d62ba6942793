"""Where and how a model comes into being: in place, without values, or on no device at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def built_in_place(device: torch.device, dtype: torch.dtype | None, empty: bool) -> Iterator[None]:
    """Build modules on ``device`` and, unless None, in ``dtype``, rather than to move and convert them later.

    Args:
        device: where parameters and buffers are made.
        dtype: what floating-point ones are made as.
        empty: leave out the initialisation of parameters.
    """
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(device)
        if empty:
            stack.enter_context(_NoInitialisation())
        if dtype is not None:
            torch.set_default_dtype(dtype)
            stack.callback(torch.set_default_dtype, before)
        yield


class _NoInitialisation(TorchFunctionMode):
    """Functions of ``torch.nn.init`` return the tensor as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)
