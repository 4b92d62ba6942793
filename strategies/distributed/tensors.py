"""Tensors and modules inside wrappers: shards of sharded tensors, tied tensors, and names without prefixes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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


def strip_compile_prefix(name: str) -> str:
    """Return a parameter's name without the prefixes that ``torch.compile`` adds.

    Args:
        name: The name of a parameter or a module.
    """
    return name.replace("_orig_mod.", "")


def split_tied(weights: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Separate distinct tensors from the aliases of tied tensors.

    Args:
        weights: Tensors by name.

    Returns:
        Two dicts: each distinct tensor by its first name, and for each further name, the first name of the same tensor.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in weights.items():
        key = make_view_key(tensor) if isinstance(tensor, Tensor) else (id(tensor),)
        first_name = first.setdefault(key, name)
        if first_name == name:
            tensors[name] = tensor
        else:
            aliases[name] = first_name
    return tensors, aliases


def make_view_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two tensors that are the same view of the same memory, as tied weights are.

    The key is valid only while the tensor exists. A tensor without memory, or a wrapper of other tensors, has a unique
    key.
    """
    local_tensor = local(tensor)
    # A tensor that consists of several ones, such as rounded weights and their scales, or one without a shape yet.
    if is_traceable_wrapper_subclass(local_tensor) or is_lazy(local_tensor):
        return (id(tensor),)
    pointer = local_tensor.untyped_storage().data_ptr()
    if pointer == 0:  # nothing is allocated, so nothing is shared
        return (id(tensor),)
    view = (
        local_tensor.storage_offset(),
        local_tensor.shape,
        local_tensor.stride(),
        local_tensor.dtype,
        local_tensor.is_conj(),
        local_tensor.is_neg(),
        tensor.shape,
    )
    return (local_tensor.device, pointer, *view)


def view_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor on the CPU as a vector of bytes that shares the memory.

    A tensor of one element is contiguous with any stride. ``reshape(-1)`` would keep this stride, with which the tensor
    may not be viewable as another dtype.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


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


def map_whole(function: Callable[[Tensor], Tensor], matrices: list[Any], dtype: torch.dtype) -> list[Tensor]:
    """Return the results of a function of full matrices, sharded like the matrices. Must be called on all ranks.

    The processes take turns: each gathers, and computes, every n-th of the matrices of one shape. Matrices that are
    sharded in another way than by their rows are gathered, and computed, by all processes.

    Args:
        function: Function that returns a matrix of the same shape.
        matrices: Sharded matrices.
        dtype: Dtype of the results.
    """
    from torch.distributed.tensor import DTensor, Shard

    results: list[Any] = [None] * len(matrices)
    groups: dict[Any, list[int]] = {}
    for number, matrix in enumerate(matrices):
        groups.setdefault((matrix.device_mesh, matrix.placements, matrix.shape, matrix.dtype), []).append(number)
    for (mesh, placements, shape, _), numbers in groups.items():
        split = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
        by_rows = len(split) == 1 and type(placements[split[0]]) is Shard and placements[split[0]].dim == 0
        size = mesh.size(split[0]) if by_rows else 1
        for start in range(0, len(numbers), size):
            turn = numbers[start : start + size]
            if by_rows:
                local_shards = [matrices[number].to_local() for number in turn]
                shards = _exchange_whole(function, local_shards, mesh, split[0], shape, dtype)
                whole = {"placements": placements, "shape": shape, "stride": matrices[turn[0]].stride()}
            else:  # replicated results, of which torch takes the shard without communication
                shards, whole = [function(matrices[number].full_tensor()) for number in turn], {}
            for number, shard in zip(turn, shards, strict=True):
                results[number] = DTensor.from_local(shard, mesh, run_check=False, **whole)
    return results


def _exchange_whole(
    function: Callable[[Tensor], Tensor],
    shards: list[Tensor],
    mesh: DeviceMesh,
    dim: int,
    shape: torch.Size,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Send the shards of the n-th matrix to the n-th process, which computes, and return this process's results."""
    from torch.distributed import all_to_all_single

    size, rank, group = mesh.size(dim), mesh.get_local_rank(dim), mesh.get_group(dim)
    rows = -(-shape[0] // size)
    sizes = [shape[1] * max(0, min(rows, shape[0] - number * rows)) for number in range(size)]
    sent = [sizes[rank] if number < len(shards) else 0 for number in range(size)]
    received = sizes if rank < len(shards) else [0] * size
    flat = torch.cat([shard.flatten() for shard in shards])
    full = flat.new_empty(sum(received))
    all_to_all_single(full, flat, received, sent, group)
    result = function(full.view(shape)).flatten() if full.numel() else full.to(dtype)
    back = flat.new_empty(sum(sent), dtype=dtype)
    all_to_all_single(back, result, sent, received, group)
    return [shard.view(-1, shape[1]) for shard in back.split(sent[: len(shards)])]


def fill(part: Tensor, full: Whole, like: Any) -> None:
    """Copy this process's shard of ``full`` into ``part``. The layout is that of the sharded tensor ``like``."""
    shape, offset = _place(like)
    part.copy_(full[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))])
