"""Coalesced communication: many tensors are averaged or broadcast in flat buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..distributed import World

BUCKET_BYTES = 25 * 2**20  # torch's default for DDP; larger buckets only need more memory


def buckets(tensors: Iterable[Tensor], limit: int = BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """Yield lists of tensors that share a dtype and device. Only a list of one tensor may exceed ``limit`` bytes."""
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        bucket, size = filling.get(kind, ([], 0))
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        filling[kind] = bucket, size + tensor.nbytes
    for bucket, _ in filling.values():
        yield bucket


def average(tensors: Iterable[Tensor], world: World) -> None:
    """Replace each tensor with its mean over the ranks, in place.

    Args:
        tensors: Floating-point tensors, with the same shapes and dtypes on every rank.
        world: Ranks over which the mean is taken.
    """
    for bucket in buckets(tensors):
        _scatter(world.all_reduce(_flatten(bucket)).div_(world.size), bucket)


def broadcast(tensors: Iterable[Tensor], world: World, source: int) -> None:
    """Overwrite the tensors with those of rank ``source``, in place."""
    for bucket in buckets(tensors):
        _scatter(world.broadcast_tensor(_flatten(bucket), source), bucket)


def count_ranks(flags: list[list[bool]], world: World) -> list[list[int]]:
    """Return on how many ranks each flag is set. They are exchanged on the host, where this waits for no device."""
    counts: list[list[int]] = world.all_reduce(torch.tensor(flags, dtype=torch.int32, device="cpu")).tolist()
    return counts


def average_gradients(parameters: list[Tensor], world: World, note: Tensor | None = None) -> Tensor | None:
    """Replace each gradient with its mean over the ranks. A missing gradient counts as zero.

    Apart from rounding, averaging does not change gradients that are already equal on all ranks. Must be called on all
    ranks with the same parameters.

    Returns:
        The mean of ``note``, a 0-d tensor, over the ranks, in the gradients' dtype; None without a note on all ranks.

    Raises:
        ValueError: If a gradient is sparse.
    """
    if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
        raise ValueError(
            "sparse gradients can't be averaged with automatic_optimization=False. Create the embedding with "
            "sparse=False."
        )
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    if note is not None:  # in the dtype of gradients, so that it is sent with them
        note = note.to(next((g.dtype for g in gradients if g.is_floating_point()), note.dtype), copy=True)
    packed = [(bucket, _flatten(bucket)) for bucket in buckets(gradients if note is None else [*gradients, note])]
    works = [world.start_all_reduce(flat) for _, flat in packed]
    for work, (bucket, flat) in zip(works, packed, strict=True):
        if work is not None:
            work.wait()
        _scatter(flat.div_(world.size), bucket)
    return note


def _flatten(bucket: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in bucket])


@torch.no_grad()
def _scatter(flat: Tensor, bucket: list[Tensor]) -> None:
    """Copy a flat buffer back into the tensors of its bucket."""
    slices = flat.split([tensor.numel() for tensor in bucket])
    torch._foreach_copy_(bucket, [values.view(tensor.shape) for values, tensor in zip(slices, bucket, strict=True)])
