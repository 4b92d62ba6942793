"""Lightning's queries about a module and the machine."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.overrides import is_overridden as has_other_method
from torch import nn

from ..callbacks import Callback
from ..common.messages import name_type
from ..common.validation import check_int
from ..trainer import DataModule, TaskModule

if TYPE_CHECKING:
    from torch import Tensor


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Return the norm of each parameter's gradient and the norm of all gradients together.

    The function does not wait for the device unless the gradients are sharded.

    Args:
        module: The module whose gradients a backward pass has computed. If the gradients are sharded, all ranks must
            call this function.
        norm_type: 2 for the Euclidean norm, ``"inf"`` for the largest absolute value, or another number above 0.
        group_separator: Text between the kind of norm and the parameter's name in each key. Default: ``"/"``.

    Returns:
        Dict of 0-d tensors, with keys such as ``"grad_2.0_norm/net.weight"``. The norm of all gradients has a key such
        as ``"grad_2.0_norm_total"``. The dict is empty if there are no gradients.
    """
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type={norm_type!r} must be a number above 0 or 'inf'.")
    gradients = {name: p.grad.detach() for name, p in module.named_parameters() if p.grad is not None}
    norms = {
        f"grad_{order}_norm{group_separator}{name}": _gather_full(torch.linalg.vector_norm(gradient, order))
        for name, gradient in gradients.items()
    }
    if norms:
        norms[f"grad_{order}_norm_total"] = torch.linalg.vector_norm(torch.stack(list(norms.values())), order)
    return norms


def _gather_full(value: Tensor) -> Tensor:
    gathered: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return gathered


def suggested_max_num_workers(local_world_size: int) -> int:
    """Return the recommended number of dataloader workers per process, at least 1.

    The number is one less than the process's share of the available CPU cores, rounded down.

    Args:
        local_world_size: Number of processes on this machine, at least 1.
    """
    check_int("local_world_size", local_world_size, 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size - 1)


def is_overridden(method_name: str, instance: object | None = None, parent: type[object] | None = None) -> bool:
    """Return whether an object overrides a method of its base class, which is determined from the object by default."""
    if instance is None:
        return False
    if parent is None:
        parent = next((base for base in (TaskModule, DataModule, Callback) if isinstance(instance, base)), None)
    if parent is None:
        raise ValueError(
            f"is_overridden got {name_type(instance)}, which is not a TaskModule, DataModule or Callback, so its base "
            "class is unknown. Pass the base class as parent=..."
        )
    return bool(has_other_method(method_name, instance, parent))


def is_param_in_hook_signature(
    hook_fx: Callable[..., Any], param: str, explicit: bool = False, min_args: int | None = None
) -> bool:
    """Return whether a method accepts a parameter. Keyword-only parameters and ``**kwargs`` are not considered.

    Args:
        hook_fx: Method whose first parameter is ``self``.
        param: Name of the parameter.
        explicit: Whether ``*args`` does not count as accepting the parameter. Default: False.
        min_args: A method with at least this many parameters, not counting ``self``, is assumed to accept any
            parameter. Default: None.
    """
    specification = inspect.getfullargspec(getattr(hook_fx, "__wrapped__", hook_fx))
    names = specification.args[1:]
    takes_any = not explicit and specification.varargs is not None
    return param in names or takes_any or (isinstance(min_args, int) and len(names) >= min_args)
