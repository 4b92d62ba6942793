"""Less common Accelerate operations on nested tensors and collectives."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper, wraps
from typing import Any

import torch
from torch import Tensor

from ..common.messages import named_ranks
from ..engine.nested import convert_to_fp32, find_batch_size, find_device, recursively_apply
from ..engine.process_state import PartialState
from ..strategies.distributed import DistributedOperationException, current_world
from .enums import TensorInformation
from .operations import gather_object


class CannotPadNestedTensorWarning(UserWarning):
    """Category that Accelerate's warning filters name. Treadle does not issue it."""


def get_shape(data: Any) -> Any:
    """Return nested ``data`` with each tensor replaced by its shape, as a list."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def get_data_structure(data: Any) -> Any:
    """Return nested ``data`` with each tensor replaced by a `TensorInformation`."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def is_tensor_information(tensor_info: Any) -> bool:
    """Return whether an object is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def initialize_tensors(data_structure: Any) -> Any:
    """Return the data that `get_data_structure` described, with uninitialized tensors on torch's default device."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the batch size of nested ``data``, or None if it contains no tensor, or only 0-d tensors."""
    try:
        return find_batch_size(data)
    except TypeError:
        return None


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Return whether a tensor is on an Intel GPU."""
    return isinstance(tensor, Tensor) and tensor.device.type == "xpu"


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Append rows of zeros to nested tensors until the number of rows is a multiple of ``num_processes``.

    Each tensor has ``batch_size`` rows along the dimension ``dim``, which must not be negative.
    """
    missing = -batch_size % num_processes

    def pad(value: Tensor) -> Tensor:
        shape = (*value.shape[:dim], missing, *value.shape[dim + 1 :])
        return torch.cat([value, value.new_zeros(shape)], dim) if missing else value

    return recursively_apply(pad, tensor, error_on_other_type=True)


def copy_tensor_to_devices(tensor: Tensor | None = None) -> Tensor:
    """Return a copy, on every rank's device, of the tensor that exactly one rank passes. The other ranks pass None.

    Raises:
        ValueError: On every rank, if not exactly one rank passed a tensor.
    """
    world = current_world()
    owners = [rank for rank, given in enumerate(world.gather_objects(tensor is not None)) if given]
    if len(owners) != 1:
        passed = (
            f"{named_ranks(owners)} did. Pass None on all ranks but one"
            if owners
            else "none did. Pass one on a single rank"
        )
        raise ValueError(f"exactly one rank must pass a tensor to copy_tensor_to_devices, but {passed}.")
    shape, dtype = world.broadcast(None if tensor is None else (tensor.shape, tensor.dtype), owners[0])
    copied = torch.empty(shape, dtype=dtype, device=world.device) if tensor is None else tensor.to(world.device).clone()
    return world.broadcast_tensor(copied, owners[0])


def verify_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a collective to compare tensor shapes across ranks first in debug mode; see `PartialState.debug`.

    If structures, shapes or device types differ, a `DistributedOperationException` is raised on every rank.
    """

    @wraps(function)
    def verified(*args: Any, **kwargs: Any) -> Any:
        state = PartialState()
        if not state.use_distributed or not state.debug:
            return function(*args, **kwargs)
        tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
        device = find_device(tensor)
        forms = gather_object([(get_shape(tensor), None if device is None else device.type)])
        if any(form != forms[0] for form in forms):
            lines = "\n".join(f"  rank {rank}: {shape} on {kind}" for rank, (shape, kind) in enumerate(forms))
            raise DistributedOperationException(
                f"{function.__module__}.{function.__name__} needs tensors of the same shape and device type on "
                f"every rank:\n{lines}"
            )
        return function(*args, **kwargs)

    return verified


def chained_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an operation so that a `DistributedOperationException` raised inside it names the operation."""

    @wraps(function)
    def chained(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            name = f"{function.__module__}.{function.__name__}"
            raise DistributedOperationException(f"{name} failed: {error}") from error

    return chained


class ConvertOutputsToFp32:
    """Callable that runs a function and converts its half-precision outputs to float32."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function and return its converted output."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> Any:
        raise pickle.PicklingError("ConvertOutputsToFp32 can't be pickled. Pickle the unwrapped function instead.")


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Do nothing, because only DeepSpeed's ZeRO-3 gathers parameters in this context. The arguments are ignored."""
    yield
