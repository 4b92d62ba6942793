"""Tensors nested in collections: applying, cutting, joining, converting. No exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ..strategies import SingleDevice
from .collectives import with_items


def is_torch_tensor(tensor: Any) -> bool:
    """Whether it is a tensor."""
    return isinstance(tensor, Tensor)


def is_namedtuple(data: Any) -> bool:
    """Whether it is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """A collection of ``obj``'s class with the items of ``generator``."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Rebuild ``data`` with ``func(item, *args, **kwargs)`` in the place of each item for which ``test_type`` holds.

    Args:
        func: what to apply.
        data: lists, tuples and mappings, nested.
        args: more for ``func``.
        test_type: what to apply it to. Default: tensors.
        error_on_other_type: raise for an item of any other kind, in place of leaving it.
        kwargs: more for ``func``.

    Raises:
        TypeError: for such an item.
    """

    def walk(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return honor_type(value, (walk(item) for item in value))
        if isinstance(value, Mapping):
            items = {key: walk(item) for key, item in value.items()}
            return items if type(value) is dict else with_items(value, items)
        if test_type(value):
            return func(value, *args, **kwargs)
        if error_on_other_type:
            name = getattr(func, "__name__", "the function")
            raise TypeError(f"{name} takes lists, tuples and dicts of what it is for, not {type(value).__name__}.")
        return value

    return walk(data)


def send_to_device(
    tensor: Any, device: torch.device | str | int, non_blocking: bool = False, skip_keys: str | list[str] | None = None
) -> Any:
    """Everything in ``tensor`` that has a ``to``, on ``device``; mappings' items called ``skip_keys`` are left."""
    skip = [skip_keys] if isinstance(skip_keys, str) else skip_keys or []
    if isinstance(tensor, Mapping) and not hasattr(tensor, "to"):
        items = {k: v if k in skip else send_to_device(v, device, non_blocking, skip) for k, v in tensor.items()}
        return items if type(tensor) is dict else with_items(tensor, items)
    if isinstance(tensor, list | tuple):
        return honor_type(tensor, (send_to_device(item, device, non_blocking, skip) for item in tensor))
    if isinstance(tensor, Tensor | nn.Module):
        return tensor.to(device, non_blocking=non_blocking)
    return tensor.to(device) if hasattr(tensor, "to") else tensor


def _list_tensors(data: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    recursively_apply(tensors.append, data)
    return tensors


def find_batch_size(data: Any) -> int | None:
    """The length along dimension 0 of the first tensor that has one; None where there is none.

    Raises:
        TypeError: where there is no tensor at all.
    """
    tensors = _list_tensors(data)
    if not tensors:
        raise TypeError(f"find_batch_size looks for a tensor, and there is none in {type(data).__name__}.")
    return next((tensor.shape[0] for tensor in tensors if tensor.ndim), None)


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor; None where there is none."""
    return next((tensor.device for tensor in _list_tensors(data)), None)


def slice_tensors(
    data: Any, tensor_slice: Any, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """``tensor[tensor_slice]`` of every tensor. The other arguments are Accelerate's and not needed."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Join a list of values of one form, each tensor along ``dim``.

    Raises:
        TypeError: for what is no tensor.
        ValueError: where there is nothing to join.
    """
    data = list(data)
    if not data:
        raise ValueError("concatenate got an empty list.")
    first = data[0]
    if isinstance(first, list | tuple):
        return honor_type(first, (concatenate(parts, dim) for parts in zip(*data, strict=True)))
    if isinstance(first, Mapping):
        items = {key: concatenate([part[key] for part in data], dim) for key in first}
        return items if type(first) is dict else with_items(first, items)
    if not isinstance(first, Tensor):
        raise TypeError(f"concatenate joins tensors in lists, tuples and dicts, not {type(first).__name__}.")
    return torch.cat(data, dim=dim)


def listify(data: Any) -> Any:
    """Every tensor as a list of numbers (or one number)."""
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def convert_to_fp32(tensor: Any) -> Any:
    """Every half-precision tensor in float32."""
    half = (torch.float16, torch.bfloat16)
    return recursively_apply(lambda t: t.float(), tensor, test_type=lambda t: isinstance(t, Tensor) and t.dtype in half)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """``model_forward``, whose half-precision outputs come in float32."""

    @wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def is_compiled_module(module: nn.Module) -> bool:
    """Whether ``torch.compile`` returned it."""
    return "_orig_mod" in getattr(module, "_modules", {})


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """The user's own module in a prepared one.

    Args:
        model: what `prepare` returned, compiled or not.
        keep_fp32_wrapper: Accelerate's; Treadle patches no ``forward``, so there is nothing to keep.
        keep_torch_compile: return the compiled form of the user's module where it was compiled itself.
        recursive: Accelerate's; wrappers inside the user's module are the user's.
    """
    unwrapped = SingleDevice().unwrap(model)
    if not keep_torch_compile:
        return unwrapped
    return next((module for module in model.modules() if module._modules.get("_orig_mod") is unwrapped), unwrapped)
