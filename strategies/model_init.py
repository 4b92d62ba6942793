"""Creation of a model directly on its device, optionally without initial values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def built_in_place(device: torch.device, dtype: torch.dtype | None, empty: bool) -> Iterator[None]:
    """Return a context in which modules are created on ``device`` and in ``dtype``.

    Args:
        device: Device on which parameters and buffers are created.
        dtype: The dtype of floating-point parameters and buffers, or None for torch's default.
        empty: Skip functions of ``torch.nn.init`` that a ``TorchFunctionMode`` can intercept. Other initializations
            still run.
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
    """Mode in which functions of ``torch.nn.init`` return the tensor unchanged, if they support function modes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)
