"""Creation of a model on another device, or without allocating memory for its weights."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
    """Return a context in which parameters of new modules are on the meta device, which uses no memory.

    Load the parameters with `load_checkpoint_and_dispatch` before use. Only the thread that enters the context is
    affected. Without ``include_buffers``, each parameter is first created on its usual device. Its memory is released
    when it is registered in the module. Parameters of lazy modules, such as ``nn.LazyLinear``, are on the meta device
    only with ``include_buffers``.

    Args:
        include_buffers: Put buffers on ``meta`` too. Default: None, which means False, because many buffers are
            computed by the module and not saved in checkpoints.
    """
    return init_on_device(torch.device("meta"), include_buffers=include_buffers)


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Return a context in which parameters of new modules are on ``device``; see `init_empty_weights`.

    Args:
        device: The device of the parameters.
        include_buffers: Put buffers on the device too. Torch's factory functions, such as ``torch.zeros``, then also
            create their tensors on ``device`` unless a device is passed. Default: None, which means False.
    """
    redirect = _Redirect(torch.device(device), bool(include_buffers))
    # Torch's own context, so that nothing is created on another device first.
    with redirect.device if include_buffers else nullcontext():
        token = _current.set(redirect)
        try:
            yield
        finally:
            _current.reset(token)


class _Redirect:
    """Target device of one context, with the copies of the tensors that were registered in that context."""

    def __init__(self, device: torch.device, buffers: bool) -> None:
        self.device = device
        self.buffers = buffers
        # A parameter registered in two places must remain one object; the reference shows whether it is still the same
        # object.
        self._moved: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def move_tensor(self, tensor: Tensor) -> Tensor | None:
        """Return a copy of a tensor on the context's device; None if it is already there or is uninitialized (lazy)."""
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


# Registered once and never removed. Torch iterates over its registration hooks when it registers a parameter, so adding
# or removing one in a thread would break the iteration in another thread. Outside of a context, they change nothing.
register_module_parameter_registration_hook(_redirect_parameter)
register_module_buffer_registration_hook(_redirect_buffer)
