"""Functions that list, group and replace the parameters and buffers of a model by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...common.messages import nearest
from ...strategies.distributed import make_view_key

READ_FROM_OUTSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules of torch that read the weights of their submodules without calling the submodules. They are never split."""


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer under each of its names, in the order of the model's modules.

    Args:
        model: The model whose tensors are listed.
    """
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in iter_direct_tensors(module)
    }


def iter_direct_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of each parameter and buffer of a module, without those of its submodules.

    Args:
        module: The module whose own tensors are listed.
    """
    for registry in (module._parameters, module._buffers):
        for name, tensor in registry.items():
            if tensor is not None:
                yield name, tensor


def is_buffer(tensor: Tensor) -> bool:
    """Return whether a model's tensor is a buffer rather than a parameter."""
    return not isinstance(tensor, nn.Parameter)


def group_tied_names(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names in groups, one group per distinct tensor, in the order of their first names.

    Args:
        tensors: Tensors by name.
    """
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(make_view_key(tensor), []).append(name)
    return list(groups.values())


def find_unsaved_names(model: nn.Module) -> set[str]:
    """Return the names of buffers that are not saved: those registered with ``persistent=False``."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }


def copy_attributes(old: Tensor, data: Tensor, plain: bool = False) -> Tensor:
    """Return ``data`` as a parameter with the class and attributes of ``old``; if ``old`` is a buffer, ``data`` itself.

    Args:
        old: The parameter or buffer to take the class, attributes and ``requires_grad`` from.
        data: The new values.
        plain: Return a parameter of class ``nn.Parameter`` without the other attributes of ``old``. Default: False.
    """
    if is_buffer(old):
        return data
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    if plain:
        return new
    if type(old) is not nn.Parameter:
        new.__class__ = type(old)  # type: ignore[assignment]
    if old.__dict__:
        new.__dict__.update(old.__dict__)
    return new


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the tensor called ``name`` in a module.

    Args:
        module: The module that registers the tensor directly, not through a submodule.
        name: The tensor's name in this module, without dots.
        tensor: The new tensor.
    """
    if isinstance(module, nn.RNNBase):
        setattr(module, name, tensor)  # the module keeps a second list of its weights, which only this call renews
    else:
        registry: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        registry[name] = tensor


def set_tensor_by_names(model: nn.Module, names: list[str], tensor: Tensor) -> None:
    """Replace one tensor under all its names.

    Args:
        model: The model that holds the tensor.
        names: All names of the tensor, relative to the model.
        tensor: The new tensor.
    """
    for name in names:
        path, _, last = name.rpartition(".")
        set_tensor(model.get_submodule(path), last, tensor)


def parse_dtype(dtype: torch.dtype | str | None, argument: str = "dtype") -> torch.dtype | None:
    """Return the dtype for a dtype or its name, such as ``"bfloat16"`` or ``"torch.bfloat16"``; None for None."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    resolved = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(resolved, torch.dtype):
        names = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
        hint = nearest(str(dtype).removeprefix("torch."), names) or " Use a dtype such as 'bfloat16'."
        raise ValueError(f"{argument}={dtype!r} is not a torch dtype.{hint}")
    return resolved


def resolve_stored_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return a tensor's dtype after the model is loaded as ``dtype``: only floating point tensors change."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def list_class_names(module: nn.Module) -> set[str]:
    """Return the names by which an argument can refer to a module's class: its own and those of its base classes."""
    return {kind.__name__ for kind in type(module).__mro__}
