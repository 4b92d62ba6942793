"""Total norm of gradients that may be sharded, and clipping to a maximum norm."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .tensors import is_sharded, local, piece_of
from .world import World

LARGE = 2**16
"""Number of elements above which the rows of a gradient are reduced by themselves."""


def clip_to_norm(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float, fixed_in: World | None = None
) -> Tensor:
    """Scale gradients down so that their total norm, over all processes, is at most ``max_norm``.

    torch's function supports neither a mixture of sharded and plain tensors nor several meshes (torch 2.13). A NaN norm
    leaves the gradients unchanged, so that the parameter with the NaN can still be found.

    Args:
        parameters: Parameters whose gradients are clipped.
        max_norm: Maximum total norm.
        norm_type: The p of the p-norm.
        fixed_in: The processes, for a norm whose rounding does not depend on the sharding; see `compute_fixed_norm`.

    Returns:
        The norm before clipping (0-d tensor); 0 if there are no gradients.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    if fixed_in is not None:
        total = compute_fixed_norm(gradients, norm_type, fixed_in)
    else:
        norms = [_compute_norm(group, norm_type) for group in _group_by_mesh(gradients)]
        total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    scale = torch.clamp(max_norm / (total.nan_to_num(nan=0.0, posinf=math.inf) + 1e-6), max=1.0)
    parts: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        parts.setdefault(local(gradient).device, []).append(local(gradient))
    for device, group in parts.items():
        torch._foreach_mul_(group, scale.to(device))
    return total


def _compute_norm(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Return the total norm of plain gradients, or of gradients that are sharded over one mesh."""
    if norm_type != math.inf or not is_sharded(gradients[0]):
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        return norm.full_tensor() if is_sharded(norm) else norm  # type: ignore[attr-defined]
    from torch.distributed.tensor import DTensor, Partial

    # torch's maximum norm raises for the empty shard of a process that holds no row of a small tensor (torch 2.13).
    mesh = gradients[0].device_mesh  # type: ignore[attr-defined]
    shards = [shard for gradient in gradients if (shard := local(gradient).detach()).numel()]
    largest = torch.nn.utils.get_total_norm(shards or [local(gradients[0]).new_zeros(1)], norm_type)
    dtype = functools.reduce(torch.promote_types, (gradient.dtype for gradient in gradients))
    return DTensor.from_local(largest.to(dtype), mesh, [Partial("max")] * mesh.ndim).full_tensor()


def _group_by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors that one operation can process together: plain tensors, and the sharded tensors of each mesh."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if is_sharded(tensor) else None, []).append(tensor)  # type: ignore
    return list(groups.values())


def compute_fixed_norm(gradients: Sequence[Tensor], norm_type: float, world: World) -> Tensor:
    """Return the total norm of gradients, with the same bits for full tensors and for shards of their rows.

    torch's sums add in an order that depends on the shape and on the number of threads. Here, each process sums its
    rows, along dimension 0, by additions of whole tensors. The sums of the rows are then added in the order of the
    parameters.

    Args:
        gradients: Full gradients that are equal on all processes, or gradients that are sharded along dimension 0.
        norm_type: The p of the p-norm: 1, 2 or infinity.
        world: The processes over which gradients are sharded.

    Raises:
        ValueError: If ``norm_type`` is another number.
    """
    if norm_type not in (1, 2, math.inf):
        raise ValueError(
            f"norm_type={norm_type} must be 1, 2 or inf with step_micro_batches, because the rounding of other powers "
            "depends on the sharding of the gradients. Use 2, or remove step_micro_batches."
        )
    exchanges = world.size > 1 and any(map(is_sharded, gradients))
    rows = []
    for gradient, own in zip(gradients, _reduce_rows([local(g).detach() for g in gradients], norm_type), strict=True):
        own = own.to(world.device)
        if exchanges:
            piece = piece_of(gradient) if is_sharded(gradient) else None
            start = piece.offset[0] if piece is not None else 0
            every = own.new_zeros(gradient.shape[0] if gradient.ndim else 1)
            if world.rank == 0 if piece is None else piece.first_copy:
                every[start : start + len(own)] = own
            own = every
        rows.append(own)
    values = torch.cat(rows)
    if exchanges:
        world.all_reduce(values)  # exact: only one process has another value than 0
    total = _reduce(values, norm_type)
    return total.sqrt() if norm_type == 2 else total


def _reduce_rows(gradients: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """Reduce the rows of each gradient."""
    # A model has many small gradients with few lengths of rows, which are reduced together: the calls cost most.
    groups: dict[Any, list[int]] = {}
    matrices = []
    for number, gradient in enumerate(gradients):
        values = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
        rows = values.reshape(len(values), math.prod(values.shape[1:])) if values.ndim else values.reshape(1, 1)
        alone = number if rows.numel() > LARGE else None
        groups.setdefault((rows.device, rows.dtype, rows.shape[1], alone), []).append(number)
        matrices.append(rows)
    reduced: dict[int, Tensor] = {}
    for numbers in groups.values():
        rows = torch.cat([matrices[number] for number in numbers])
        sums = _reduce(rows.square_() if norm_type == 2 else rows.abs_(), norm_type)
        reduced |= zip(numbers, sums.split([len(matrices[number]) for number in numbers]), strict=True)
    return [reduced[number] for number in range(len(gradients))]


def _reduce(values: Tensor, norm_type: float) -> Tensor:
    """Reduce the last dimension. A sum adds halves, so its rounding does not depend on the other dimensions."""
    if not values.shape[-1]:
        return values.sum(-1)
    if norm_type == math.inf:
        return values.amax(-1)
    while (size := values.shape[-1]) > 1:
        half = size // 2
        pairs = values[..., :half] + values[..., half : 2 * half]
        if size % 2:
            pairs[..., 0] += values[..., -1]
        values = pairs
    return values[..., 0]
