"""Operations on sharded tensors, such as their conversion from and to full tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Group = list[Tensor]


def is_sharded(value: Any) -> bool:
    """Return whether ``value`` is a ``DTensor``, torch's class for sharded tensors."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def get_original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before FSDP replaced it with a generated class."""
    kind = type(module)
    return kind.__bases__[-1] if hasattr(module, "_get_fsdp_state") else kind


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard as a plain tensor with the same memory. A plain tensor is returned unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def gather_parameters(module: nn.Module) -> None:
    """Gather the parameters of a module that FSDP shards as a unit, for a use other than a call of the module.

    FSDP reduces their gradients and shards them again at the end of the backward pass. Other modules are unchanged.
    """
    if hasattr(module, "unshard"):
        module.unshard()  # type: ignore[operator]


def whole(value: Any, keep: bool) -> Any:
    """Return a nested state with sharded tensors gathered in host memory. Must be called on all ranks.

    Args:
        value: Nested dicts, lists and tuples. Other tensors are returned unchanged, regardless of ``keep``.
        keep: Whether this process needs the result. If False, it gets None for each sharded tensor.
    """
    if is_sharded(value):
        full = value.detach().full_tensor()
        return full.cpu() if keep else None
    if isinstance(value, dict):
        return {name: whole(item, keep) for name, item in value.items()}
    if isinstance(value, list | tuple):
        items = [whole(item, keep) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def keep_random_state(mesh: DeviceMesh) -> None:
    """Keep each process's own GPU RNG state during random operations on sharded tensors.

    Otherwise, the first such operation would copy rank zero's state to all processes (torch 2.13), and dropout would
    use the same masks on all of them.
    """
    from torch.distributed.tensor import _random

    if not _random._rng_tracker:
        _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)


def count_shards(tensor: Any) -> int:
    """Return the number of shards that a tensor is divided into, without copies of them; 1 for a plain tensor."""
    if not is_sharded(tensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


class Piece(NamedTuple):
    """Shard of a tensor on one process."""

    local: Tensor
    offset: tuple[int, ...]
    """Offset of the shard in the full tensor."""
    first_copy: bool
    """True if this process, and no other process with the same shard, writes the shard."""


def piece_of(tensor: Any) -> Piece:
    """Return this process's shard of a tensor as a `Piece`."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise TypeError(
            f"a tensor is placed as {tensor.placements}, so each process has only a partial result. Redistribute the "
            "tensor with Replicate() or Shard(dim) first."
        )
    mesh = tensor.device_mesh
    copies = [at for at, p in zip(mesh.get_coordinate(), tensor.placements, strict=True) if p.is_replicate()]
    # If the tensor is on a part of a larger grid, each such part has a copy; that of rank zero is the first.
    return Piece(tensor.to_local(), _place(tensor)[1], not any(copies) and int(mesh.mesh.min()) == 0)


def _place(like: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and offset of this process's shard."""
    # Also supports tensors that are split along two dimensions of the mesh; torch's own checkpoints use it.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)


class Whole(Protocol):
    """Tensor in memory or in a file, with a shape and a dtype. Indexing returns its values."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""

    def __getitem__(self, index: Any) -> Tensor:
        """Return the indexed values; ``...`` returns all of them."""


def cut_like(full: Whole, like: Any) -> Tensor:
    """Return ``full`` sharded like another tensor. Each process copies its own shard, without communication.

    If ``like`` is not sharded, the result is all of ``full``.
    """
    if not is_sharded(like):
        return full[...]
    from torch.distributed.tensor import DTensor

    like_shard = local(like)
    part = torch.empty_like(
        like_shard, dtype=full.dtype, device=full.device if isinstance(full, Tensor) else like_shard.device
    )
    fill(part, full, like)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def replicate_like(full: Tensor, like: Any) -> Tensor:
    """Return a tensor that all processes have as one that is replicated on the mesh of a sharded tensor."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(full, like.device_mesh, run_check=False)


def fill(part: Tensor, full: Whole, like: Any) -> None:
    """Copy this process's shard of ``full`` into ``part``. The layout is that of the sharded tensor ``like``."""
    shape, offset = _place(like)
    part.copy_(full[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))])


def by_mesh(tensors: Iterable[Tensor]) -> list[Group]:
    """Group tensors that one operation can process together: plain tensors, and the sharded tensors of each mesh."""
    groups: dict[Any, Group] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if is_sharded(tensor) else None, []).append(tensor)  # type: ignore
    return list(groups.values())


def clip_to_norm(parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Scale gradients down so that their total norm, over all processes, is at most ``max_norm``.

    torch's function supports neither a mixture of sharded and plain tensors nor several meshes (torch 2.13). A NaN norm
    leaves the gradients unchanged, so that the parameter with the NaN can still be found.

    Returns:
        The norm before clipping (0-d tensor); 0 if there are no gradients.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    norms = [torch.nn.utils.get_total_norm(group, norm_type) for group in by_mesh(gradients)]
    norms = [norm.full_tensor() if is_sharded(norm) else norm for norm in norms]  # type: ignore[attr-defined]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    scale = torch.clamp(max_norm / (total.nan_to_num(nan=0.0, posinf=math.inf) + 1e-6), max=1.0)
    parts: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        parts.setdefault(local(gradient).device, []).append(local(gradient))
    for device, group in parts.items():
        torch._foreach_mul_(group, scale.to(device))
    return total
