"""Building a model without memory for its weights."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from .module_tensors import copy_attributes


def init_empty_weights(include_buffers: bool | None = None) -> Any:
    """A context in which modules are built with their parameters on device ``meta``, which takes no memory.

    Load them with `load_checkpoint_and_dispatch` before use. Only the thread that enters it is affected; it may be
    entered again inside itself, and an error inside leaves nothing behind. A parameter is made as the module's code
    says and dropped at once, so that the memory in use is one parameter's at most.

    Args:
        include_buffers: Buffers too. Default: no, since most are computed and in no checkpoint.
    """
    return init_on_device(torch.device("meta"), include_buffers=include_buffers)


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """A context in which modules are built with their parameters on ``device``.

    Args:
        device: Where they go.
        include_buffers: Buffers too; then every tensor that is made inside without naming a device is made there, so
            code that reads values back while it builds can't run with ``meta``. Default: no.
    """
    redirect = _Redirect(torch.device(device), bool(include_buffers))
    with ExitStack() as stack:
        if include_buffers:
            stack.enter_context(redirect.device)  # nothing is made elsewhere first
        stack.enter_context(_hooked())
        token = _current.set(redirect)
        try:
            yield
        finally:
            _current.reset(token)


class _Redirect:
    """Where the tensors go that are registered inside one context."""

    def __init__(self, device: torch.device, buffers: bool) -> None:
        self.device = device
        self.buffers = buffers
        # One registered in two places must stay one; the reference tells whether it is still the same object.
        self._moved: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def move_tensor(self, tensor: Tensor) -> Tensor | None:
        """The tensor on the device; None where it is there already, or has no shape yet."""
        on_target = tensor.device.type == self.device.type and self.device.index in (None, tensor.device.index)
        if on_target or nn.parameter.is_lazy(tensor):
            return None
        original, moved = self._moved.get(id(tensor), (None, None))
        if original is None or original() is not tensor:
            moved = copy_attributes(tensor, tensor.detach().to(self.device))
            self._moved[id(tensor)] = (weakref.ref(tensor), moved)
        return moved


_current: ContextVar[_Redirect | None] = ContextVar("treadle_init_on_device", default=None)


def _redirect_parameter(module: nn.Module, name: str, parameter: Any) -> Any:
    redirect = _current.get()
    return None if redirect is None else redirect.move_tensor(parameter)


def _redirect_buffer(module: nn.Module, name: str, buffer: Any) -> Any:
    redirect = _current.get()
    return None if redirect is None or buffer is None or not redirect.buffers else redirect.move_tensor(buffer)


class _Hooks:
    """torch's registration hooks, there as long as any thread is inside a context.

    They are torch's own and of the whole process. One pair serves all threads, because torch walks the list of hooks
    while it registers a parameter: a thread that came or went meanwhile would break the others' walk.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._handles: list[Any] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._handles = [
                    register_module_parameter_registration_hook(_redirect_parameter),
                    register_module_buffer_registration_hook(_redirect_buffer),
                ]
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    for handle in self._handles:
                        handle.remove()


_hooked = _Hooks()
