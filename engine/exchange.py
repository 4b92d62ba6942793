"""Gathering and reducing whatever a user hands over: nested, uneven, tensors or objects."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from ..strategies import World, choose

REDUCTIONS = ("sum", "mean", "max", "min", "none")


def gather_rows(tensor: Tensor, world: World) -> Tensor:
    """Concatenate every process's ``tensor`` along dimension 0, in rank order; row counts may differ.

    A 0-d tensor counts as one row.
    """
    rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
    if world.size == 1:
        return rows
    shapes = world.gather_objects((tuple(rows.shape[1:]), rows.dtype, rows.shape[0]))
    if len({shape[:2] for shape in shapes}) > 1:
        listed = "; ".join(f"rank {r}: {(n, *shape)} {dtype}" for r, (shape, dtype, n) in enumerate(shapes))
        raise ValueError(f"gather needs tensors that differ in dimension 0 only, but got {listed}.")
    counts = [count for _, _, count in shapes]
    longest = max(counts)
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    return torch.cat([part[:count] for part, count in zip(world.all_gather(padded), counts, strict=True)])


def gather(value: Any, world: World) -> Any:
    """`gather_rows` for every tensor in a nested value.

    Raises:
        TypeError: if the value holds no tensor.
    """
    found = False

    def one(tensor: Tensor) -> Tensor:
        nonlocal found
        found = True
        return gather_rows(tensor, world)

    gathered = apply_to_collection(value, Tensor, one)
    if not found:
        raise TypeError(
            f"gather takes tensors, alone or nested, not {type(value).__name__}: use gather_for_metrics or "
            "gather_object for other values."
        )
    return gathered


def no_rows(value: Any) -> Any:
    """A nested value with every tensor's rows left out, as a process with nothing to add hands it over."""
    return apply_to_collection(value, Tensor, lambda t: (t.reshape(1) if t.ndim == 0 else t)[:0])


def holds_tensor(value: Any) -> bool:
    """Whether there is a tensor anywhere in ``value``."""
    seen: list[Tensor] = []
    apply_to_collection(value, Tensor, seen.append)
    return bool(seen)


def gather_objects(value: Any, world: World) -> list[Any]:
    """Every process's items, in rank order: lists are joined, anything else is one item."""
    parts = world.gather_objects(value)
    return [item for part in parts for item in (part if isinstance(part, list | tuple) else [part])]


def reduce(value: Any, world: World, reduction: str, scale: float) -> Any:
    """Combine every tensor in a nested value over the processes; the input is left as it is."""
    choose("reduction", reduction, REDUCTIONS)

    def one(tensor: Tensor) -> Tensor:
        result = tensor.detach().clone()
        if reduction == "none":
            return result
        if reduction == "mean" and not result.is_floating_point():
            result = result.double()
        return world.all_reduce(result, reduction) * scale if scale != 1.0 else world.all_reduce(result, reduction)

    return apply_to_collection(value, Tensor, one)


def pad_across_processes(value: Any, world: World, dim: int, pad_index: int, pad_first: bool) -> Any:
    """Pad every tensor in a nested value along ``dim`` to the longest one of any process."""

    def one(tensor: Tensor) -> Tensor:
        if dim >= tensor.ndim or world.size == 1:
            return tensor
        longest = max(world.gather_objects(tensor.shape[dim]))
        missing = longest - tensor.shape[dim]
        if not missing:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = missing
        filler = tensor.new_full(shape, pad_index)
        return torch.cat((filler, tensor) if pad_first else (tensor, filler), dim=dim)

    return apply_to_collection(value, Tensor, one)
