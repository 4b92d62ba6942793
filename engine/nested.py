"""Local operations on tensors nested in collections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ..common.messages import name_type
from ..strategies import SingleDevice, iter_tensors
from .collectives import describe_no_tensor, map_items


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether an object is a ``torch.Tensor``.

    Args:
        tensor: Any object.
    """
    return isinstance(tensor, Tensor)


def is_namedtuple(data: Any) -> bool:
    """Return whether an object is a named tuple.

    Args:
        data: Any object.
    """
    return isinstance(data, tuple) and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return a collection of the same class as ``obj`` with the items of ``generator``.

    Args:
        obj: A list, tuple or named tuple.
        generator: The items of the new collection.
    """
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Rebuild ``data``, replacing each selected item with ``func(item, *args, **kwargs)``.

    Args:
        func: The function to apply.
        data: A value, or nested lists, tuples and mappings of values.
        args: Further arguments of ``func``.
        test_type: Function that returns whether an item is selected. Default: `is_torch_tensor`.
        error_on_other_type: Raise an error for an item that is not selected. Default: False, which keeps such items.
        kwargs: Further keyword arguments of ``func``.

    Raises:
        TypeError: If ``error_on_other_type`` is True and an item is not selected.
    """

    def apply(value: Any) -> Any:
        if isinstance(value, Mapping | list | tuple):
            return map_items(value, lambda _, item: apply(item))
        if test_type(value):
            return func(value, *args, **kwargs)
        if error_on_other_type:
            name = getattr(func, "__name__", "the function")
            kind = "tensors" if test_type is is_torch_tensor else "values for which test_type returns True"
            raise TypeError(
                f"{name} does not support {name_type(value)}. Pass {kind}, or nest them in lists, tuples or dicts."
            )
        return value

    return apply(data)


def send_to_device(
    tensor: Any, device: torch.device | str | int, non_blocking: bool = False, skip_keys: str | list[str] | None = None
) -> Any:
    """Return the data with tensors, and other objects with a ``to`` method, moved to a device.

    Args:
        tensor: A value, or values nested in lists, tuples and mappings.
        device: The target device.
        non_blocking: Copy pinned tensors asynchronously. Default: False.
        skip_keys: Mapping keys whose values are not moved.
    """
    skip = [skip_keys] if isinstance(skip_keys, str) else skip_keys or []
    if isinstance(tensor, list | tuple) or (isinstance(tensor, Mapping) and not hasattr(tensor, "to")):
        skip_here = skip if isinstance(tensor, Mapping) else ()
        return map_items(
            tensor, lambda key, item: item if key in skip_here else send_to_device(item, device, non_blocking, skip)
        )
    if isinstance(tensor, Tensor | nn.Module):
        return tensor.to(device, non_blocking=non_blocking)
    return tensor.to(device) if hasattr(tensor, "to") else tensor


def find_batch_size(data: Any) -> int | None:
    """Return the size of dimension 0 of the first tensor that is not 0-d; None if all tensors are 0-d.

    Args:
        data: Tensors in a nested structure.

    Raises:
        TypeError: If ``data`` contains no tensor.
    """
    tensors = list(iter_tensors(data))
    if not tensors:
        raise TypeError(
            f"find_batch_size needs tensors, but got {describe_no_tensor(data)}. Pass a batch that contains a tensor."
        )
    return next((tensor.shape[0] for tensor in tensors if tensor.ndim), None)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in ``data``, or None.

    Args:
        data: Tensors in a nested structure.
    """
    return next((tensor.device for tensor in iter_tensors(data)), None)


def slice_tensors(
    data: Any, tensor_slice: Any, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return the data with each tensor indexed with ``tensor_slice``.

    Args:
        data: Tensors in a nested structure.
        tensor_slice: A slice or an index.
        process_index: Unused.
        num_processes: Unused.
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Concatenate a list of tensors, or the corresponding tensors of a list of collections, along ``dim``.

    Args:
        data: A list of tensors, or of collections of tensors with the same structure. A single value that is not a
            tensor is returned unchanged.
        dim: The dimension to concatenate along. Default: 0.

    Raises:
        TypeError: If an item is not a tensor.
        ValueError, KeyError, RuntimeError: If the values cannot be concatenated.
    """
    data = list(data)
    if not data:
        raise ValueError("concatenate got an empty list. Pass at least one value.")
    first = data[0]
    if isinstance(first, Mapping | list | tuple):
        if not isinstance(first, Mapping) and len({len(part) for part in data}) > 1:
            raise ValueError("concatenate got collections of different lengths. Pass equal structures.")
        return map_items(first, lambda key, _: concatenate([part[key] for part in data], dim))
    if not isinstance(first, Tensor):
        if len(data) == 1:
            return first
        raise TypeError(
            f"concatenate does not support {name_type(first)}. Pass tensors, or nest them in lists, tuples or dicts."
        )
    return torch.cat(data, dim=dim)


def listify(data: Any) -> Any:
    """Convert every tensor to a nested list of numbers; a 0-d tensor becomes a number.

    Args:
        data: Tensors in a nested structure.
    """
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def convert_to_fp32(tensor: Any) -> Any:
    """Convert every float16 and bfloat16 tensor to float32.

    Args:
        tensor: Tensors in a nested structure.
    """
    half = (torch.float16, torch.bfloat16)
    return recursively_apply(lambda t: t.float(), tensor, test_type=lambda t: isinstance(t, Tensor) and t.dtype in half)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``model_forward`` so that its half-precision outputs are converted to float32.

    Args:
        model_forward: A model's ``forward`` or another function.
    """

    @wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether a module was returned by ``torch.compile``.

    Args:
        module: The module to check.
    """
    return "_orig_mod" in getattr(module, "_modules", {})


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the original module that a prepared module wraps.

    Args:
        model: A module returned by `prepare`, compiled or not.
        keep_fp32_wrapper: Accepted for compatibility with Accelerate; unused.
        keep_torch_compile: Return the compiled form of the module, if there is one. Default: True.
        recursive: Accepted for compatibility with Accelerate; unused.
    """
    unwrapped = SingleDevice().unwrap(model)
    if not keep_torch_compile:
        return unwrapped
    return next((module for module in model.modules() if module._modules.get("_orig_mod") is unwrapped), unwrapped)
