"""Many tensors sent as few: averages and copies over the processes in flat pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .world import World

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
