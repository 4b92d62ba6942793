"""Lightning's queries about a module and the machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..common.validation import check_int

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
