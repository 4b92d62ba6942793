"""Shards made whole, and whole tensors cut into shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Group = list[Tensor]


def is_sharded(value: Any) -> bool:
    """Whether ``value`` is one process's part of a larger tensor (torch's ``DTensor``)."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """This process's part, as a plain tensor over the same memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(value: Any, keep: bool) -> Any:
    """A copy of a nested state in host memory with every sharded tensor whole. All processes must ask.

    Args:
        value: dicts, lists and tuples of anything.
        keep: whether this process wants the result; else it only gives its parts, one tensor after the other.
    """
    if is_sharded(value):
        full = value.detach().full_tensor()
        return full.cpu() if keep else None
    if isinstance(value, dict):
        return {name: whole(item, keep) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([whole(item, keep) for item in value])
    return value


def cut_like(full: Tensor, like: Any) -> Tensor:
    """This process's part of ``full``, laid out over the processes as ``like`` is; no exchange."""
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import DTensor

    part = torch.empty_like(local(like), dtype=full.dtype, device=full.device)
    fill(part, full, like)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def fill(part: Tensor, full: Tensor, like: Any) -> None:
    """Copy this process's part of ``full``, laid out as ``like`` is, into ``part``."""
    # Where a shard begins, also if it is cut along two dimensions of the mesh; torch's own checkpoints use it.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    cut = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    part.copy_(full[cut])


def by_mesh(tensors: Iterable[Tensor]) -> list[Group]:
    """Tensors in groups that one operation can take: plain ones, and those of each mesh."""
    groups: dict[Any, Group] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if is_sharded(tensor) else None, []).append(tensor)  # type: ignore
    return list(groups.values())


def clip_to_norm(parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Scale gradients down so that the norm of all of them together, over all processes, is at most ``max_norm``.

    torch's own function takes no mixture of sharded and plain tensors, nor of meshes (2.13).

    Returns:
        The norm before (0-d tensor, the same on every process).
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    norms = [torch.nn.utils.get_total_norm(group, norm_type) for group in by_mesh(gradients)]
    norms = [norm.full_tensor() if is_sharded(norm) else norm for norm in norms]  # type: ignore[attr-defined]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    parts: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        parts.setdefault(local(gradient).device, []).append(local(gradient))
    for device, group in parts.items():
        torch._foreach_mul_(group, scale.to(device))
    return total
