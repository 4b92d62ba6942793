"""Small questions to a module, a value or the machine, asked by scripts."""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..common.validation import check_int
from ..strategies import Strategy, World
from ..strategies.distributed import whole

if TYPE_CHECKING:
    from torch import Tensor


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Tensor]:
    """The norm of each parameter's gradient, and of all of them together. Reads nothing from the device.

    Args:
        module: whose gradients, after a backward; where they are sharded, all processes must ask.
        norm_type: 2 for the Euclidean norm, ``"inf"`` for the greatest element, or another number above 0.
        group_separator: stands between the kind of the norm and the parameter's name.

    Returns:
        0-d tensors by name, such as ``"grad_2.0_norm/net.weight"``, the last one ``"grad_2.0_norm_total"``.

    Raises:
        ValueError: for a norm that is none.
    """
    order = float(norm_type)
    if order <= 0:
        raise ValueError(f"norm_type={norm_type!r} must be above 0, or 'inf'.")
    gradients = {name: p.grad.detach() for name, p in module.named_parameters() if p.grad is not None}
    norms = {
        f"grad_{order}_norm{group_separator}{name}": _gather_full(torch.linalg.vector_norm(gradient, order))
        for name, gradient in gradients.items()
    }
    if norms:
        norms[f"grad_{order}_norm_total"] = torch.linalg.vector_norm(torch.stack(list(norms.values())), order)
    return norms


def _gather_full(value: Tensor) -> Tensor:
    gathered: Tensor = whole({"": value}, True)[""] if hasattr(value, "full_tensor") else value
    return gathered


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """The names of parameters that are one and the same, those of each in a list."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [shared for shared in names.values() if len(shared) > 1]


def set_shared_parameters(module: nn.Module, shared_params: Sequence[Sequence[str]]) -> nn.Module:
    """Make parameters one and the same again, as `find_shared_parameters` found them: the first of each list stays."""
    for first, *others in shared_params:
        parameter = module.get_parameter(first)
        for name in others:
            parent, _, attribute_name = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute_name, parameter)
    return module


def is_picklable(obj: object) -> bool:
    """Whether an object can be pickled, so that it can be sent to another process."""
    try:
        pickle.dumps(obj)
    except (pickle.PickleError, AttributeError, RuntimeError, TypeError):
        return False
    return True


def suggested_max_num_workers(local_world_size: int) -> int:
    """Loader workers that each of ``local_world_size`` processes on this machine can have, one core left for itself.

    Raises:
        ValueError: for less than one process.
    """
    check_int("local_world_size", local_world_size, 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size - 1)


def is_shared_filesystem(strategy: Strategy | World, path: str | Path | None = None) -> bool:
    """Whether all processes see the same files below ``path``. All processes must ask.

    Args:
        strategy: the run's.
        path: a directory that exists; the working directory by default.
    """
    world = strategy if isinstance(strategy, World) else strategy.world
    folder = Path.cwd() if path is None else Path(path)
    with world.together():
        if not folder.is_dir():
            raise ValueError(f"path={str(path)!r} is no directory.")
    mark: Any = world.broadcast(folder / f".shared-{uuid.uuid4().hex}" if world.is_main else None)
    with world.together():
        if world.is_main:
            mark.touch()
    is_shared = world.all(mark.exists())
    if world.is_main:
        mark.unlink()
    return is_shared
