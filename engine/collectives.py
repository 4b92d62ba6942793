"""Collectives on nested values, and the split of inputs over processes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Set, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.data import Dataset, IterableDataset, Subset

from ..common.messages import format_count, name_type
from ..common.validation import choose
from ..strategies import DistributedOperationException, apply_nested, iter_tensors
from . import data

if TYPE_CHECKING:
    from ..strategies import World


REDUCTIONS = ("sum", "mean", "max", "min", "none")


class ShapesDiffer(DistributedOperationException, ValueError):
    """Error raised if the tensors that ranks pass to one collective are not compatible."""


class DebugMode:
    """Switch of Accelerate's debug mode for the whole process; see `PartialState.debug`."""

    enabled = False


debug_mode = DebugMode()


def check_equal_shapes(name: str, value: Any, world: World) -> None:
    """Check in debug mode that all ranks pass tensors of the same shapes and dtypes to the collective ``name``."""
    if debug_mode.enabled and world.size > 1:
        _check_forms(name, value, world)


def gather(value: Any, world: World, empty: bool = False, sync_grads: bool = False, samples: int | None = None) -> Any:
    """Concatenate the tensors of all processes along dimension 0, in rank order; the numbers of rows may differ.

    A 0-d tensor counts as one row. Each part of ``value`` without tensors is gathered as by `gather_items`, except
    fields of a dataclass, which are not gathered. If ``empty``, this process contributes no rows and no items. For
    ``sync_grads``, see `Accelerator.gather`. ``samples`` is the number of samples in this process's batch, if known.

    Raises:
        TypeError: If the value holds no tensor.
        ShapesDiffer: On every process, if the values of the processes are not compatible.
    """
    tensors: list[Tensor] = []
    objects: list[Any] = []
    _map_leaves(value, tensors.append, objects.append)
    if not tensors:
        raise TypeError(
            f"gather needs tensors, but got {describe_no_tensor(value)}. For other values, use gather_for_metrics or "
            "gather_object."
        )
    if not sync_grads:
        tensors = [t.detach() for t in tensors]
    rows = [t.reshape(1) if t.ndim == 0 else t for t in tensors]
    if empty:
        rows = [t[:0] for t in rows]
    if world.size == 1:
        return _rebuild(value, rows, [_merge([_take_items(other, empty)]) for other in objects])
    grads = ["" if t.requires_grad else " without gradient" for t in rows] if sync_grads else [""] * len(rows)
    mine = [(tuple(t.shape[1:]), f"{t.dtype}{grad}", t.shape[0]) for t, grad in zip(rows, grads, strict=True)]
    by_sample = samples is not None and not empty and _has_tensor_per_sample(value, samples)
    gathered_parts = world.gather_objects((mine, [_take_items(other, empty) for other in objects], by_sample))
    if any(flag for *_, flag in gathered_parts):
        raise ShapesDiffer(
            f"gather_for_metrics got a list with one tensor for each of the {samples} samples of the batch, and would "
            "concatenate the tensors of different samples. Use gather_for_metrics(..., use_gather_object=True), which "
            "returns a list with all samples. If the list is not one tensor per sample, pass a tuple."
        )
    parts = [(shapes, lists) for shapes, lists, _ in gathered_parts]
    forms = [([form[:2] for form in shapes], len(lists)) for shapes, lists in parts]
    if any(form != forms[0] for form in forms):
        raise ShapesDiffer(
            "gather needs the same number of values on every process, and tensors that differ only in the size of "
            f"dimension 0, but got {_describe_parts(parts)}. Use gather_for_metrics(..., use_gather_object=True), "
            "which accepts any value."
        )
    gathered = [
        _gather_rows(tensor, [shapes[number][2] for shapes, _ in parts], world) for number, tensor in enumerate(rows)
    ]
    lists = [_merge([every[number] for _, every in parts]) for number in range(len(objects))]
    return _rebuild(value, gathered, lists)


def resize_repeated(value: Any, batch_size: int, samples: int) -> Any:
    """Resize tensors that repeat one value ``batch_size`` times to ``samples`` rows, one per sample of the batch.

    Scripts gather ``loss.repeat(batch_size)`` to average the loss over the samples, and rely on Accelerate to drop the
    surplus rows of a short last batch.
    """

    def resize(tensor: Tensor) -> Tensor:
        # A single row may also be a sum; it then counts once, regardless of the number of samples in it.
        if batch_size == 1 or tuple(tensor.shape) != (batch_size,) or not tensor.is_floating_point():
            return tensor
        return tensor[:1].repeat(samples) if bool((tensor == tensor[0]).all()) else tensor

    return _map_leaves(value, resize, lambda other: other)


def _gather_rows(rows: Tensor, counts: list[int], world: World) -> Tensor:
    longest = max(counts)
    if rows.shape[0] != longest:
        rows = torch.cat((rows, rows.new_zeros((longest - rows.shape[0], *rows.shape[1:]))))
    parts = _AllGather.apply(rows, world) if rows.requires_grad else world.all_gather(rows)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


class _AllGather(torch.autograd.Function):
    """Autograd function that stacks the tensors of all processes.

    The backward pass sums each tensor's gradient over the losses of all processes, because DDP and FSDP then average
    the parameters' gradients.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: World) -> Tensor:
        ctx.world = world
        return torch.stack(world.all_gather(tensor))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.world.reduce_scatter(grad), None


def all_gather(value: Any, world: World, sync_grads: bool = False) -> Any:
    """Stack the tensors of all processes along a new first dimension. With a world size of 1, return ``value``."""
    if world.size == 1:
        return value
    fix = (
        "Use Accelerator.gather to concatenate batches of different sizes, or DataLoader(drop_last=True) to skip the "
        "short last batch."
    )
    _check_forms("all_gather", value, world, fix, sync_grads)

    def gather_tensor(tensor: Tensor) -> Tensor:
        if sync_grads and tensor.requires_grad:
            return _AllGather.apply(tensor, world)
        return torch.stack(world.all_gather(tensor.detach()))

    return apply_nested(value, Tensor, gather_tensor)


def describe_no_tensor(value: Any) -> str:
    """Describe a value in which no tensor was found, such as ``"a dict without tensors"``."""
    is_container = isinstance(value, Iterable) and not isinstance(value, str | bytes)
    return f"{name_type(value)}{' without tensors' * is_container}"


def _describe_parts(parts: list[Any]) -> str:
    counts_differ = len({len(lists) for _, lists in parts}) > 1
    by_rank = []
    for rank, (shapes, lists) in enumerate(parts):
        tensors = ", ".join(f"{(rows, *shape)} {dtype}" for shape, dtype, rows in shapes)
        count = f" and {format_count(len(lists), 'other value')}" if counts_differ else ""
        by_rank.append(f"rank {rank}: {tensors}{count}")
    return "; ".join(by_rank)


def _describe_form(tensor: Tensor, sync_grads: bool) -> str:
    without = " without gradient" if sync_grads and not tensor.requires_grad else ""
    return f"{tuple(tensor.shape)} {tensor.dtype}{without}"


def _map_leaves(value: Any, tensor: Callable[[Tensor], Any], other: Callable[[Any], Any]) -> Any:
    """Rebuild a nested value: apply ``tensor`` to each tensor, and ``other`` to each outermost part without tensors."""
    if isinstance(value, Tensor):
        return tensor(value)
    if not holds_tensor(value):
        return other(value)
    if isinstance(value, Mapping | list | tuple):
        return map_items(value, lambda _, item: _map_leaves(item, tensor, other))
    return apply_nested(value, Tensor, tensor)  # for example a dataclass


def with_items(value: Any, items: dict[Any, Any]) -> Any:
    """Return a shallow copy of the mapping ``value``, updated with ``items``."""
    copied = copy.copy(value)
    for key, item in items.items():
        copied[key] = item
    return copied


def map_items(value: Any, function: Callable[[Any, Any], Any]) -> Any:
    """Return a mapping, list or tuple of the same class, with ``function(key, item)`` in place of each item."""
    if isinstance(value, Mapping):
        items = {key: function(key, item) for key, item in value.items()}
        return items if type(value) is dict else with_items(value, items)
    parts = [function(number, item) for number, item in enumerate(value)]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _rebuild(value: Any, tensors: list[Tensor], objects: list[Any]) -> Any:
    next_tensor, next_other = iter(tensors), iter(objects)
    return _map_leaves(value, lambda _: next(next_tensor), lambda _: next(next_other))


def holds_tensor(value: Any) -> bool:
    """Return whether a nested value contains a tensor."""
    return next(iter_tensors(value), None) is not None


def _to_items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def gather_objects(value: Any, world: World) -> list[Any]:
    """Return one list of the items of all processes, in rank order. A value other than a list or tuple is one item."""
    return [item for part in world.gather_objects(_to_items(value)) for item in part]


def gather_items(value: Any, world: World, empty: bool = False) -> Any:
    """Return the items of all processes, in rank order, in the same structure for any number of processes.

    A tuple of lists, or a dict of lists, such as ``(predictions, references)``, is gathered item by item. Any other
    value becomes one list. If ``empty``, this process contributes no items.

    Raises:
        ShapesDiffer: On every process, if the structures of the processes differ.
    """
    return _merge(world.gather_objects(_take_items(value, empty)))


def _list_fields(value: Any) -> tuple[Any, ...] | None:
    """Return the names of the lists in a tuple or dict of lists; None for any other value."""
    if not isinstance(value, tuple | Mapping) or not value:
        return None
    items = value.values() if isinstance(value, Mapping) else value
    is_nested = all(isinstance(item, list) or _list_fields(item) is not None for item in items)
    return tuple(value if isinstance(value, Mapping) else range(len(value))) if is_nested else None


def _take_items(value: Any, empty: bool) -> Any:
    if _list_fields(value) is None:
        return [] if empty else _to_items(value)
    return map_items(value, lambda _, item: _take_items(item, empty))


def _merge(parts: list[Any]) -> Any:
    """Join the results of `_take_items` of all processes."""
    fields = [_list_fields(part) for part in parts]
    if any(names != fields[0] for names in fields):
        by_rank = "; ".join(
            f"rank {rank}: {name_type(part)}{'' if names is None else f' of {len(names)} lists'}"
            for rank, (part, names) in enumerate(zip(parts, fields, strict=True))
        )
        raise ShapesDiffer(
            f"gather_for_metrics needs the same structure of lists on every process, but got {by_rank}. Pass a list "
            "with one item for each sample."
        )
    if fields[0] is None:
        return [item for part in parts for item in part]
    return map_items(parts[0], lambda key, _: _merge([part[key] for part in parts]))


def take_first(gathered: Any, count: int) -> Any:
    """Return the first ``count`` items of each list in a result of `gather_items`."""
    if isinstance(gathered, list):
        return gathered[:count]
    return map_items(gathered, lambda _, item: take_first(item, count))


def _has_tensor_per_sample(value: Any, samples: int) -> bool:
    """Return whether a list in ``value`` has one tensor for each sample, rather than tensors with a row for each."""
    if isinstance(value, list) and len(value) == samples and all(isinstance(item, Tensor) for item in value):
        return any(item.ndim and item.shape[0] != samples for item in value)
    if isinstance(value, Mapping | list | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        return any(_has_tensor_per_sample(item, samples) for item in items)
    return False


def reduce(value: Any, world: World, reduction: str, scale: float) -> Any:
    """Reduce every tensor in a nested value over the processes; see `Accelerator.reduce`."""
    choose("reduction", reduction, REDUCTIONS)
    if world.size > 1 and reduction != "none":
        _check_forms("reduce", value, world)  # otherwise gloo returns what was in memory, and NCCL hangs

    def reduce_tensor(tensor: Tensor) -> Tensor:
        result = tensor.detach().clone()
        if reduction == "none":
            return result
        if reduction == "mean" and not (result.is_floating_point() or result.is_complex()):
            result = result.double()
        return world.all_reduce(result, reduction) * scale if scale != 1.0 else world.all_reduce(result, reduction)

    return apply_nested(value, Tensor, reduce_tensor)


_PAD = "Convert or pad the tensors first, for example with pad_across_processes."


def _check_forms(name: str, value: Any, world: World, fix: str = _PAD, sync_grads: bool = False) -> None:
    local_forms = [_describe_form(tensor, sync_grads) for tensor in iter_tensors(value)]
    forms = world.gather_objects(local_forms)
    if any(form != local_forms for form in forms):
        by_rank = "; ".join(f"rank {rank}: {', '.join(form) or 'no tensor'}" for rank, form in enumerate(forms))
        raise ShapesDiffer(
            f"{name} needs tensors of the same shapes and dtypes on every process, but got {by_rank}. {fix}"
        )


def pad_across_processes(value: Any, world: World, dim: int, pad_index: float, pad_first: bool) -> Any:
    """Pad tensors to the length of the longest one on any process; see `Accelerator.pad_across_processes`."""
    if world.size == 1:
        return value
    tensors = list(iter_tensors(value))
    shapes = world.gather_objects([tuple(t.shape) for t in tensors])
    if any([len(shape) for shape in rank_shapes] != [t.ndim for t in tensors] for rank_shapes in shapes):
        by_rank = "; ".join(
            f"rank {rank}: {', '.join(map(str, every)) or 'no tensor'}" for rank, every in enumerate(shapes)
        )
        raise ShapesDiffer(
            "pad_across_processes needs the same number of tensors, with the same number of dimensions, on every "
            f"process, but got {by_rank}. Use gather_object for other values."
        )
    longest = iter(
        [
            max(shape[dim] if _has_dimension(tensor, dim) else 0 for shape in rank_shapes)
            for tensor, rank_shapes in zip(tensors, zip(*shapes, strict=True), strict=True)
        ]
    )

    def pad_tensor(tensor: Tensor) -> Tensor:
        length = next(longest)
        if not _has_dimension(tensor, dim) or tensor.shape[dim] == length:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = length - tensor.shape[dim]
        filler = tensor.new_full(shape, pad_index)
        return torch.cat((filler, tensor) if pad_first else (tensor, filler), dim=dim)

    return apply_nested(value, Tensor, pad_tensor)


def _has_dimension(tensor: Tensor, dim: int) -> bool:
    return -tensor.ndim <= dim < tensor.ndim


def broadcast(value: Any, world: World, source: int) -> Any:
    """Return ``value`` with its tensors replaced by those of rank ``source``; all ranks need the same structure."""
    check_process(source, world.size, "from_process")
    if world.size > 1:
        _check_forms("broadcast", value, world)
    return apply_nested(value, Tensor, lambda t: world.broadcast_tensor(t.detach().clone(), source))


def check_process(index: int, size: int, name: str) -> None:
    """Raise a ValueError if ``index`` is not a rank below ``size``; ``name`` is the name of the user's argument."""
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < size:
        valid = "0" if size == 1 else f"a rank from 0 to {size - 1}"
        whose = "the number of processes on this machine" if name.startswith("local") else "the world size"
        raise ValueError(f"{name}={index!r} must be {valid}, because {whose} is {size}.")


def split(inputs: Any, rank: int, size: int, apply_padding: bool = False) -> Any:
    """Return the share of ``inputs`` that belongs to process ``rank``.

    Shares are contiguous, in the order of the ranks. Their sizes differ by at most one. With ``apply_padding``, all
    shares have the same size: the last input is repeated at the end.

    ``inputs`` is a list, tuple, range, tensor, NumPy array, pandas data frame, or map-style dataset of torch or Hugging
    Face, or a dict or named tuple of these with equal lengths. Any other iterable, such as an iterator, is read to its
    end by every process, and the share is then a list.

    Raises:
        TypeError: If ``inputs`` cannot be split or has no order.
        ValueError: If ``inputs`` is a dict or named tuple whose values differ in length.
    """
    count, inputs = _count_inputs(inputs)
    if not apply_padding or not count:
        return _select(inputs, data.share(count, rank, size))
    share_size = -(-count // size)
    return _select(inputs, [min(i, count - 1) for i in range(rank * share_size, (rank + 1) * share_size)])


def _count_inputs(inputs: Any) -> tuple[int, Any]:
    """Return the number of inputs, and the inputs as a value that can be sliced."""
    if isinstance(inputs, Mapping):
        return _count_fields(inputs)
    if hasattr(inputs, "_fields"):  # a named tuple
        count, fields = _count_fields(inputs._asdict())
        return count, type(inputs)(**fields)
    if isinstance(inputs, Tensor | np.ndarray) and inputs.ndim:
        return inputs.shape[0], inputs
    if isinstance(inputs, Sized) and (isinstance(inputs, list | tuple | range) or _has_rows(inputs)):
        return len(inputs), inputs
    try:
        # Other tables than pandas' are split by columns.
        if isinstance(inputs, str | bytes | bytearray | Set) or hasattr(inputs, "columns"):
            raise TypeError("it has no rows in an order that is the same on all processes")
        listed = list(inputs)
    except TypeError as error:
        raise TypeError(
            f"split_between_processes can't split {inputs!r:.40} ({name_type(inputs)}): {error}. Pass a list of the "
            "inputs in the same order on all processes, such as sorted(inputs)."
        ) from None
    return len(listed), listed


def _has_rows(inputs: Any) -> bool:
    """Return whether the inputs are a data frame or a map-style dataset of torch or Hugging Face."""
    is_dataset = isinstance(inputs, Dataset) and not isinstance(inputs, IterableDataset)
    return is_dataset or hasattr(inputs, "iloc") or _has_row_select(inputs)


def _has_row_select(inputs: Any) -> bool:
    # Other tables have a `select` too, for columns.
    return callable(getattr(inputs, "select", None)) and hasattr(inputs, "__getitems__")


def _count_fields(inputs: Any) -> tuple[int, Any]:
    counted = {key: _count_inputs(value) for key, value in inputs.items()}
    counts = {key: count for key, (count, _) in counted.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{key!r}: {count}" for key, count in counts.items())
        raise ValueError(
            f"split_between_processes got {name_type(inputs)} whose values differ in length ({listed}). Pass values of "
            "the same length."
        )
    return next(iter(counts.values()), 0), with_items(inputs, {key: value for key, (_, value) in counted.items()})


def _select(inputs: Any, selection: slice | list[int]) -> Any:
    if isinstance(inputs, Mapping) or hasattr(inputs, "_fields"):
        return map_items(inputs, lambda _, value: _select(value, selection))
    if isinstance(inputs, Tensor | np.ndarray):
        return inputs[selection]
    if hasattr(inputs, "iloc"):
        return inputs.iloc[selection]
    if isinstance(inputs, list | tuple | range):
        if isinstance(selection, slice):
            return inputs[selection]
        items = [inputs[i] for i in selection]
        return type(inputs)(items) if isinstance(inputs, list | tuple) else items
    indices = range(len(inputs))[selection] if isinstance(selection, slice) else selection
    # An empty range behind the last row is an IndexError in datasets.
    return inputs.select(indices or []) if _has_row_select(inputs) else Subset(inputs, indices)
