"""torch's profiler, and a context manager that labels the calls of a model's submodules in its records."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function
from torch.utils.hooks import RemovableHandle

from ...common.lazy_exports import lazy_exports
from ...engine.profilers import PyTorchProfiler

__all__ = ["PyTorchProfiler", "RegisterRecordFunction"]


class RegisterRecordFunction:
    """Context manager that records each call of a model's submodules as a profiler range with class and name."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._open: list[Any] = []

    def __enter__(self) -> None:
        for name, part in self._model.named_modules():
            if name:
                text = f"[pl][module]{type(part).__module__}.{type(part).__name__}: {name}"
                self._handles.append(part.register_forward_pre_hook(partial(self._start, text)))
                self._handles.append(part.register_forward_hook(self._stop, always_call=True))

    def _start(self, text: str, *_: Any) -> None:
        record = record_function(text)
        record.__enter__()
        self._open.append(record)

    def _stop(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)

    def __exit__(self, *error: Any) -> None:
        while self._handles:
            self._handles.pop().remove()


__getattr__ = lazy_exports(__name__)[0]  # the names that the tables have
