"""Gathering and reducing whatever a user hands over: nested, uneven, tensors or objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Set, Sized
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.data import Dataset, IterableDataset, Subset

from ..common.validation import choose
from ..strategies import DistributedOperationException, World
from .data import share

REDUCTIONS = ("sum", "mean", "max", "min", "none")


class ShapesDiffer(DistributedOperationException, ValueError):
    """The ranks pass tensors of different number, shape or format to one call."""


class DebugMode:
    """Accelerate's debug mode, one for the whole process: ``PartialState().debug`` switches it.

    Attributes:
        enabled: `check_equal_shapes` compares.
    """

    enabled = False


debug_mode = DebugMode()


def check_equal_shapes(name: str, value: Any, world: World) -> None:
    """In debug mode, check that all ranks pass tensors of the same shapes, which `gather` itself does not need.

    Raises:
        ShapesDiffer: on every rank.
    """
    if debug_mode.enabled and world.size > 1:
        _check_forms(name, value, world)


def gather(value: Any, world: World, empty: bool = False, sync_grads: bool = False) -> Any:
    """Concatenate every process's tensors along dimension 0, in rank order; row counts may differ.

    A 0-d tensor counts as one row. What holds no tensor becomes a list of every process's items.

    Args:
        value: a tensor, or tensors nested in dicts, lists, tuples or dataclasses, of one form on all processes.
        world: the processes.
        empty: this process has nothing to add; ``value`` only shows the form.
        sync_grads: let gradients flow back to the process that each row came from; see `_AllGather`.

    Raises:
        TypeError: if the value holds no tensor.
        ShapesDiffer: on every process, if the forms differ.
    """
    tensors: list[Tensor] = []
    others: list[Any] = []
    _walk(value, tensors.append, others.append)
    if not tensors:
        raise TypeError(
            f"gather takes tensors, alone or nested, not {type(value).__name__}: use gather_for_metrics or "
            "gather_object for other values."
        )
    if not sync_grads:
        tensors = [t.detach() for t in tensors]
    rows = [t.reshape(1) if t.ndim == 0 else t for t in tensors]
    if empty:
        rows = [t[:0] for t in rows]
    if world.size == 1:
        return _rebuild(value, rows, [_to_items(other, empty) for other in others])
    grads = ["" if t.requires_grad else " without gradient" for t in rows] if sync_grads else [""] * len(rows)
    mine = [(tuple(t.shape[1:]), f"{t.dtype}{grad}", t.shape[0]) for t, grad in zip(rows, grads, strict=True)]
    parts = world.gather_objects((mine, [_to_items(other, empty) for other in others]))
    forms = [([form[:2] for form in shapes], len(lists)) for shapes, lists in parts]
    if any(form != forms[0] for form in forms):
        listed = "; ".join(
            f"rank {rank}: {', '.join(f'{(n, *shape)} {dtype}' for shape, dtype, n in shapes)}"
            for rank, (shapes, _) in enumerate(parts)
        )
        raise ShapesDiffer(
            f"gather needs the same number of tensors on every process, that differ in dimension 0 only, but got "
            f"{listed}. gather_for_metrics(..., use_gather_object=True) takes anything."
        )
    gathered = [
        _gather_rows(tensor, [shapes[number][2] for shapes, _ in parts], world) for number, tensor in enumerate(rows)
    ]
    lists = [[item for _, every in parts for item in every[number]] for number in range(len(others))]
    return _rebuild(value, gathered, lists)


def resize_repeated(value: Any, batch_size: int, samples: int) -> Any:
    """Give a number that stands once per sample of a full batch as many rows as the batch has samples.

    Scripts gather ``loss.repeat(batch_size)`` for a mean over the samples and rely on Accelerate to cut the rows of a
    short last batch. Rows that differ are left as they are: a batch may have that many tokens.

    Args:
        value: tensors, nested; one-dimensional floating-point ones of ``batch_size`` equal rows are resized.
        batch_size: this rank's samples in a full batch.
        samples: this rank's samples in the running batch.
    """

    def resize(tensor: Tensor) -> Tensor:
        # One row may be a sum as well, which counts once however many samples it is of.
        if batch_size == 1 or tuple(tensor.shape) != (batch_size,) or not tensor.is_floating_point():
            return tensor
        return tensor[:1].repeat(samples) if bool((tensor == tensor[0]).all()) else tensor

    return _walk(value, resize, lambda other: other)


def _gather_rows(rows: Tensor, counts: list[int], world: World) -> Tensor:
    longest = max(counts)
    if rows.shape[0] != longest:
        rows = torch.cat((rows, rows.new_zeros((longest - rows.shape[0], *rows.shape[1:]))))
    parts = _AllGather.apply(rows, world) if rows.requires_grad else world.all_gather(rows)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


class _AllGather(torch.autograd.Function):
    """Every process's tensor, stacked. The gradient of one is the sum of what all processes' losses say.

    DDP and FSDP average the parameters' gradients over the processes. So the gradient of a run is that of the mean of
    the processes' losses, as functions of all tensors: where each process computes the loss of the whole global batch,
    that is the gradient of one process with the whole batch, without any factor.
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
    """Stack every process's tensors along a new first dimension; of one process they are left as they are.

    Args:
        value: a tensor, or tensors nested in dicts, lists, tuples or dataclasses, of the same shapes on all processes.
        world: the processes.
        sync_grads: let gradients flow back to the process that each tensor came from; see `_AllGather`.

    Raises:
        ShapesDiffer: on every process, if the shapes differ.
    """
    if world.size == 1:
        return value
    local_forms: list[str] = []
    apply_to_collection(value, Tensor, lambda t: local_forms.append(_describe_form(t, sync_grads)))
    forms = world.gather_objects(local_forms)
    if any(form != local_forms for form in forms):
        by_rank = "; ".join(f"rank {rank}: {', '.join(form) or 'no tensor'}" for rank, form in enumerate(forms))
        raise ShapesDiffer(
            f"all_gather stacks tensors, which needs the same shapes and formats on every process, but got {by_rank}. "
            "Accelerator.gather concatenates batches of different sizes; DataLoader(drop_last=True) leaves the last, "
            "short one out."
        )

    def gather_tensor(tensor: Tensor) -> Tensor:
        if sync_grads and tensor.requires_grad:
            return _AllGather.apply(tensor, world)
        return torch.stack(world.all_gather(tensor.detach()))

    return apply_to_collection(value, Tensor, gather_tensor)


def _describe_form(tensor: Tensor, sync_grads: bool) -> str:
    without = " without gradient" if sync_grads and not tensor.requires_grad else ""
    return f"{tuple(tensor.shape)} {tensor.dtype}{without}"


def _walk(value: Any, tensor: Callable[[Tensor], Any], other: Callable[[Any], Any]) -> Any:
    """Rebuild a nested value with each tensor, and each largest part that holds none, replaced by what is returned."""
    if isinstance(value, Tensor):
        return tensor(value)
    if not holds_tensor(value):
        return other(value)
    if isinstance(value, Mapping):
        items = {key: _walk(item, tensor, other) for key, item in value.items()}
        return items if type(value) is dict else with_items(value, items)
    if isinstance(value, list | tuple):
        parts = [_walk(item, tensor, other) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return apply_to_collection(value, Tensor, tensor)  # a dataclass


def with_items(value: Any, items: dict[Any, Any]) -> Any:
    """A mapping like ``value``, of its class and with its other attributes, that holds ``items``."""
    copied = copy.copy(value)
    for key, item in items.items():
        copied[key] = item
    return copied


def _rebuild(value: Any, tensors: list[Tensor], others: list[Any]) -> Any:
    next_tensor, next_other = iter(tensors), iter(others)
    return _walk(value, lambda _: next(next_tensor), lambda _: next(next_other))


def holds_tensor(value: Any) -> bool:
    """Whether there is a tensor anywhere in ``value``."""
    tensors: list[Tensor] = []
    apply_to_collection(value, Tensor, tensors.append)
    return bool(tensors)


def _to_items(value: Any, empty: bool = False) -> list[Any]:
    if empty:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def gather_objects(value: Any, world: World) -> list[Any]:
    """Every process's items, in rank order: lists are joined, anything else is one item."""
    return [item for part in world.gather_objects(_to_items(value)) for item in part]


def reduce(value: Any, world: World, reduction: str, scale: float) -> Any:
    """Combine every tensor in a nested value over the processes; the input is left as it is.

    Raises:
        ShapesDiffer: on every process, if their tensors differ in number, shape or format.
    """
    choose("reduction", reduction, REDUCTIONS)
    if world.size > 1 and world.debug is None and reduction != "none":
        _check_forms("reduce", value, world)  # gloo returns what was in memory, NCCL hangs

    def reduce_tensor(tensor: Tensor) -> Tensor:
        result = tensor.detach().clone()
        if reduction == "none":
            return result
        if reduction == "mean" and not result.is_floating_point():
            result = result.double()
        return world.all_reduce(result, reduction) * scale if scale != 1.0 else world.all_reduce(result, reduction)

    return apply_to_collection(value, Tensor, reduce_tensor)


def _check_forms(name: str, value: Any, world: World) -> None:
    local_forms: list[str] = []
    apply_to_collection(value, Tensor, lambda t: local_forms.append(_describe_form(t, False)))
    forms = world.gather_objects(local_forms)
    if any(form != local_forms for form in forms):
        by_rank = "; ".join(f"rank {rank}: {', '.join(form) or 'no tensor'}" for rank, form in enumerate(forms))
        raise ShapesDiffer(f"{name} needs tensors of the same shapes and formats on every process, but got {by_rank}.")


def pad_across_processes(value: Any, world: World, dim: int, pad_index: float, pad_first: bool) -> Any:
    """Pad every tensor in a nested value along ``dim`` to the longest one of any process.

    Raises:
        ShapesDiffer: on every process, if they hold different numbers of tensors, or of dimensions.
    """
    if world.size == 1:
        return value
    tensors: list[Tensor] = []
    apply_to_collection(value, Tensor, tensors.append)
    shapes = world.gather_objects([tuple(t.shape) for t in tensors])
    if any([len(shape) for shape in rank_shapes] != [t.ndim for t in tensors] for rank_shapes in shapes):
        by_rank = "; ".join(f"rank {rank}: {', '.join(map(str, every))}" for rank, every in enumerate(shapes))
        raise ShapesDiffer(
            f"pad_across_processes needs the same number of tensors, of as many dimensions, on every process, but got "
            f"{by_rank}."
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

    return apply_to_collection(value, Tensor, pad_tensor)


def _has_dimension(tensor: Tensor, dim: int) -> bool:
    return -tensor.ndim <= dim < tensor.ndim


def broadcast(value: Any, world: World, source: int) -> Any:
    """Process ``source``'s tensors, in a nested value of one form on all processes; the input is left as it is.

    Raises:
        ShapesDiffer: on every process, if their tensors differ in number, shape or format.
    """
    check_process(source, world.size, "from_process")
    if world.size > 1 and world.debug is None:
        _check_forms("broadcast", value, world)
    return apply_to_collection(value, Tensor, lambda t: world.broadcast_tensor(t.detach().clone(), source))


def check_process(index: int, size: int, name: str) -> None:
    """Raise if there is no process ``index``.

    Raises:
        ValueError: names the argument, and the processes that there are.
    """
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < size:
        raise ValueError(f"{name}={index!r}: the {size} process(es) are numbered 0 to {size - 1}.")


def split(inputs: Any, rank: int, size: int, apply_padding: bool = False) -> Any:
    """Process ``rank``'s share of ``inputs``, in their own form; the inputs are left as they are.

    Shares are contiguous, in the order of the ranks; their sizes differ by at most one, and where there are fewer
    inputs than processes the last shares are empty. With ``apply_padding`` all shares have the same size: the last
    input is repeated after the end, so that the gathered results' first ``len(inputs)`` are those of the inputs.

    Args:
        inputs: a list, tuple, range, tensor, array, data frame or dataset (of torch, or with ``select``); a dict (or
            named tuple) of these, of one length; or any other iterable, an iterator too, which every process reads to
            its end and whose share is a list.
        rank: this process.
        size: number of processes.
        apply_padding: give every process as many.

    Raises:
        TypeError: for what is no collection (a str, a number), or has no order (a set).
        ValueError: for a dict whose values differ in length.
    """
    count, inputs = _count_inputs(inputs)
    if not apply_padding or not count:
        return _select(inputs, share(count, rank, size))
    share_size = -(-count // size)
    return _select(inputs, [min(i, count - 1) for i in range(rank * share_size, (rank + 1) * share_size)])


def _count_inputs(inputs: Any) -> tuple[int, Any]:
    """How many inputs there are, and the inputs in a form that can be cut."""
    if isinstance(inputs, str | bytes | bytearray):
        raise TypeError(
            f"split_between_processes got one {type(inputs).__name__}, {inputs[:40]!r}, which would be cut into its "
            "letters. For several inputs give a list of them; with one there is nothing to split."
        )
    if isinstance(inputs, Set):
        raise TypeError(
            f"split_between_processes got a {type(inputs).__name__}, whose order differs between processes: "
            "give sorted(inputs)."
        )
    if isinstance(inputs, Mapping):
        return _count_fields(inputs)
    if hasattr(inputs, "_fields"):  # a named tuple
        count, fields = _count_fields(inputs._asdict())
        return count, type(inputs)(**fields)
    if isinstance(inputs, Tensor | np.ndarray):
        if not inputs.ndim:
            raise TypeError("split_between_processes got a single number (a 0-d tensor): there is nothing to split.")
        return inputs.shape[0], inputs
    if isinstance(inputs, Sized) and (isinstance(inputs, list | tuple | range) or _is_indexable(inputs)):
        return len(inputs), inputs
    try:
        listed = list(inputs)
    except TypeError as error:
        raise TypeError(
            f"split_between_processes takes collections and iterables, not {type(inputs).__name__} ({error})."
        ) from None
    return len(listed), listed


def _is_indexable(inputs: Any) -> bool:
    """Data frames, Hugging Face's datasets, and torch's."""
    if hasattr(inputs, "iloc") or _has_row_select(inputs):
        return True
    if hasattr(inputs, "columns"):
        raise TypeError("split_between_processes would go through this table by columns: give its rows as a list.")
    return isinstance(inputs, Dataset) and not isinstance(inputs, IterableDataset)


def _has_row_select(inputs: Any) -> bool:
    # Other tables have a `select` too, for columns.
    return callable(getattr(inputs, "select", None)) and hasattr(inputs, "__getitems__")


def _count_fields(inputs: Any) -> tuple[int, Any]:
    counted = {}
    for key, value in inputs.items():
        try:
            counted[key] = _count_inputs(value)
        except TypeError as error:
            raise TypeError(
                f"split_between_processes got a {type(inputs).__name__} whose {key!r} can't be split: {error}"
            ) from None
    counts = {key: count for key, (count, _) in counted.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{key!r}: {count}" for key, count in counts.items())
        raise ValueError(f"split_between_processes got a dict whose values differ in length ({listed}).")
    return next(iter(counts.values()), 0), with_items(inputs, {key: value for key, (_, value) in counted.items()})


def _select(inputs: Any, selection: slice | list[int]) -> Any:
    if isinstance(inputs, Mapping):
        return with_items(inputs, {key: _select(value, selection) for key, value in inputs.items()})
    if hasattr(inputs, "_fields"):
        return type(inputs)(*(_select(value, selection) for value in inputs))
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
    return inputs.select(indices) if _has_row_select(inputs) else Subset(inputs, indices)
