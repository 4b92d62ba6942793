"""Many tensors sent as few: averages and copies over the processes in flat pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..distributed import World

_PIECE = 32 * 2**20  # bytes sent at once; more would only take memory


def pieces(tensors: Iterable[Tensor], limit: int = _PIECE) -> Iterator[list[Tensor]]:
    """Yield the tensors in lists of one dtype and device, of about ``limit`` bytes each."""
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        piece, size = filling.pop(kind, ([], 0))
        piece.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size < limit:
            filling[kind] = piece, size
        else:
            yield piece
    for piece, _ in filling.values():
        yield piece


def average(tensors: Iterable[Tensor], world: World) -> None:
    """Replace each tensor by its mean over the processes, in place. All must give the same shapes in the same order."""
    for piece in pieces(tensors):
        flat = _flat(piece)
        _write(piece, world.all_reduce(flat).div_(world.size))


def broadcast(tensors: Iterable[Tensor], world: World, source: int) -> None:
    """Overwrite the tensors, in place, with those of process ``source``."""
    for piece in pieces(tensors):
        _write(piece, world.broadcast_tensor(_flat(piece), source))


def _flat(piece: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in piece])


@torch.no_grad()
def _write(piece: list[Tensor], flat: Tensor) -> None:
    parts = flat.split([tensor.numel() for tensor in piece])
    torch._foreach_copy_(piece, [part.view(tensor.shape) for part, tensor in zip(parts, piece, strict=True)])


_BUCKET_BYTES = 25 * 2**20


def average_gradients(parameters: Iterable[Tensor], world: World) -> None:
    """Replace each gradient by its mean over all processes; one that a process lacks counts as zero there.

    What is the same everywhere stays so: gradients may be averaged again after more has been added to them. One that no
    process has stays None. All processes must call it with the same parameters.
    """
    if world.size == 1:
        return
    own = list(dict.fromkeys(parameters))
    if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in own):
        raise ValueError("sparse gradients can't be averaged on demand: make the embedding with sparse=False.")
    there = torch.tensor([float(parameter.grad is not None) for parameter in own], device=world.device)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
    works = [world.start_all_reduce(there)]
    packed = []
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        works.append(world.start_all_reduce(flat))
        packed.append((bucket, flat))
    for work in works:
        if work is not None:
            work.wait()
    for bucket, flat in packed:
        flat.div_(world.size)
        parts = flat.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [part.view(g.shape) for part, g in zip(parts, bucket, strict=True)])
    if any(parameter.grad is None for parameter in own):  # else nothing has to be read from the device
        for parameter, gradient, somewhere in zip(own, gradients, there.tolist(), strict=True):
            if parameter.grad is None and somewhere:
                parameter.grad = gradient


def _buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Tensors of one format each, in buffers of a size that is sent well."""
    buckets: list[list[Tensor]] = []
    open_ones: dict[torch.dtype, tuple[list[Tensor], int]] = {}
    for gradient in gradients:
        bucket, size = open_ones.get(gradient.dtype, ([], 0))
        if not bucket or size + gradient.nbytes > _BUCKET_BYTES:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(gradient)
        open_ones[gradient.dtype] = (bucket, size + gradient.nbytes)
    return buckets
