"""State of metric objects and of values that a task collects: in checkpoints, around placeholders, over ranks."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...common.messages import format_count, name_type, warn
from ...strategies import World, apply_nested
from ..data import share

_METHODS = ("compute", "reset", "state_dict", "load_state_dict")
_MOST = 256  # a longer list among a task's attributes holds data, not metrics
_UNTOUCHED = frozenset({*vars(nn.Module()), "training"}) - {"_buffers"}
_NUMBERS = (int, float, complex, str, type(None))


def find(owner: nn.Module) -> dict[str, Any]:
    """Return a module's metric objects by place, such as ``"head.accuracy"``, including those in lists and dicts.

    Objects of torchmetrics and compatible modules are recognized by ``_defaults`` and ``_reductions``, other objects by
    methods such as ``compute``.
    """
    metrics: dict[str, Any] = {}
    visited: set[int] = set()
    for place, metric in _iter_metrics(owner):
        if id(metric) not in visited:
            visited.add(id(metric))
            metrics[place] = metric
    return metrics


def _iter_metrics(owner: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from _iter_in_module("", owner)
    for name, value in list(vars(owner).items()):
        if isinstance(value, dict):
            several: Iterable[tuple[Any, Any]] = value.items()
        elif isinstance(value, list | tuple):
            several = enumerate(value)
        else:
            yield from _iter_in_attribute(name, value)
            continue
        if len(value) <= _MOST:
            for key, item in list(several):
                yield from _iter_in_attribute(f"{name}[{key!r}]", item)


def _iter_in_attribute(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        yield from _iter_in_module(f"{place}.", value)
    # The type is examined, because some objects have an attribute of any name.
    elif all(callable(getattr(type(value), name, None)) for name in _METHODS):
        yield place, value


def _iter_in_module(place: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in module.named_modules():
        if isinstance(getattr(part, "compute_groups", None), dict):
            part.values(copy_state=False)  # type: ignore[operator]  # the members of a group get their common state
        if _has_states(part):
            yield place + name, part


def _has_states(part: Any) -> bool:
    attributes = vars(part)
    return isinstance(attributes.get("_defaults"), dict) and isinstance(attributes.get("_reductions"), dict)


def collect_part_ids(metrics: Iterable[Any]) -> set[int]:
    """Return the ids of ``metrics`` and of their submodules."""
    return {id(part) for m in metrics for part in (m.modules() if isinstance(m, nn.Module) else (m,))}


def find_places(logged: dict[str, Any], objects: dict[str, Any], owner: nn.Module | None) -> dict[str, str]:
    """Return the place in ``objects`` of each logged metric, by name; warn about metrics without a place."""
    places_by_id = {id(metric): place for place, metric in objects.items()}
    logged_places = {}
    for name, metric in logged.items():
        if id(metric) in places_by_id:
            logged_places[name] = places_by_id[id(metric)]
        elif owner is not None:
            warn(
                f"{name!r} was logged as {name_type(metric)} whose state is not saved in the checkpoint. Assign the "
                f"metric to an attribute of {type(owner).__name__}. A custom metric also needs state_dict and "
                "load_state_dict."
            )
    return logged_places


def collect_states(objects: dict[str, Any], empty: set[int], world: World) -> dict[str, list[Any] | None]:
    """Return, for each place, the list of the object's states on all processes. Must be called on all ranks.

    The result is None for objects whose ids are in ``empty``.
    """
    # On the device if they stay in this process, where no wait for them is needed.
    device = None if world.size == 1 else "cpu"
    local_counts = {place: _copy_state(metric, device) for place, metric in objects.items() if id(metric) not in empty}
    every = world.gather_objects(local_counts) if objects else [local_counts]
    return {place: [part[place] for part in every] if place in local_counts else None for place in objects}


def load(objects: dict[str, Any], saved: dict[str, list[Any] | None], world: World) -> None:
    """Restore states returned by `collect_states`, also with another world size.

    Raises:
        ValueError: If a metric's state cannot be split.
    """
    for place, states in saved.items():
        metric = objects.get(place)
        if metric is None:
            if states is not None:
                warn(
                    f"the checkpoint has the state of the metric {place!r}, but the task has no metric with this name, "
                    "so the state is ignored."
                )
        elif states is None:
            metric.reset()
        else:
            _restore_state(
                metric, states[world.rank] if len(states) == world.size else _share_counts(metric, place, states, world)
            )


@contextmanager
def preserve_counts(metrics: Iterable[Any]) -> Iterator[None]:
    """Return a context that restores the state of metric objects when it ends."""
    saved_states = [
        (metric, copy.deepcopy(_copy_state(metric)), getattr(metric, "_computed", None)) for metric in metrics
    ]
    try:
        yield
    finally:
        for metric, counts, computed in saved_states:
            _restore_state(metric, counts)
            # A metric with a result exchanges nothing in compute(); if only some ranks have one, the others hang.
            if _has_states(metric):
                metric._computed = computed


def _copy_state(metric: Any, device: str | None = None) -> Any:
    if not _has_states(metric):
        return metric.state_dict()
    return {
        "states": {name: _copy_value(getattr(metric, name), device) for name in metric._defaults},
        "count": getattr(metric, "_update_count", 0),
        "more": {name: _copy_value(value, device) for name, value in vars(metric).items() if _is_counter(name, value)},
    }


def _is_counter(name: str, value: Any) -> bool:
    # Attributes that the wrappers MinMaxMetric and Running have besides their states.
    return name == "_num_vals_seen" or (isinstance(value, Tensor) and not value.ndim and name in ("min_val", "max_val"))


def _copy_value(value: Any, device: Any) -> Any:
    # A copy in any case, because the next update may add to a state in place.
    return apply_nested(value, Tensor, lambda tensor: tensor.detach().to(device or tensor.device, copy=True))


def _restore_state(metric: Any, saved: Any) -> None:
    if saved is None:
        metric.reset()
        return
    if not _has_states(metric):
        metric.load_state_dict(saved)
        return
    device = getattr(metric, "device", None)
    for name, value in (saved["states"] | saved["more"]).items():
        current = getattr(metric, name, None)
        setattr(metric, name, _copy_value(value, current.device if isinstance(current, Tensor) else device))
    metric._update_count = saved["count"]
    metric._computed = None


def _share_counts(metric: Any, place: str, every: list[Any], world: World) -> Any:
    """Return this process's share of states saved with another world size."""
    if not _has_states(metric):
        if len(every) == 1:
            return every[0] if world.is_main else None
        raise _make_refusal(metric, place, len(every), world, "the reduction of its state is unknown")
    count = sum(part["count"] for part in every)
    if not count:
        return _copy_state(metric)
    states = {}
    for name, default in metric._defaults.items():
        shared = _share_state([part["states"][name] for part in every], metric._reductions[name], world)
        if shared is None:
            problem = "has no reduction" if metric._reductions[name] is None else "can't be split over the ranks"
            raise _make_refusal(
                metric, place, len(every), world, f"its state {name!r} ({name_type(default)}) {problem}"
            )
        states[name] = shared
    for name, value in every[0]["more"].items():
        if any(bool(part["more"][name] != value) for part in every):
            raise _make_refusal(
                metric, place, len(every), world, f"its attribute {name!r} differs between the processes"
            )
    return {"states": states, "count": -(-count // world.size), "more": every[0]["more"]}


def _share_state(values: list[Any], reduction: Any, world: World) -> Any:
    """Return this process's share of a state, such that all shares reduce to the saved total; None if impossible."""
    if isinstance(values[0], list):
        return _share_list([item for value in values for item in value], reduction, world)
    if reduction is None or len({value.shape for value in values}) > 1:
        return None
    whole = reduction(torch.stack(values))
    if not isinstance(whole, Tensor) or whole.shape != values[0].shape:
        return None
    if world.size == 1:
        return whole
    for filler in (whole, torch.zeros_like(whole)):  # means and extremes, or sums
        reduced = reduction(torch.stack([whole] + [filler] * (world.size - 1)))
        if torch.allclose(reduced.double(), whole.double(), rtol=1e-5, atol=0.0, equal_nan=True):
            return whole if world.is_main else filler
    return None


def _share_list(items: list[Any], reduction: Any, world: World) -> list[Any] | None:
    if getattr(reduction, "__name__", "") == "dim_zero_cat":
        if items and len(items) < world.size:  # torchmetrics gathers no empty tensors, unless they contain numbers
            items = list(torch.cat([torch.atleast_1d(item) for item in items]).split(1))
    elif len(items) % world.size:  # they are gathered one by one, so each process must have equally many
        return None
    return items[share(len(items), world.rank, world.size)]


def _make_refusal(metric: Any, place: str, saved_size: int, world: World, why: str) -> ValueError:
    saved_by = format_count(saved_size, "process")
    return ValueError(
        f"the metric {place!r} ({type(metric).__name__}) was saved by {saved_by} within an epoch, and its state can't "
        f"be split over {format_count(world.size, 'process')}: {why}. Resume with {saved_by}, or from a "
        "checkpoint saved at the end of an epoch."
    )


# -- values of a task --------------------------------------------------------------------------------------------------


@contextmanager
def preserve_values(owner: nn.Module) -> Iterator[None]:
    """Return a context that restores the values of a module's own attributes when it ends.

    In an evaluation, a rank may process a sample of another rank, so that the collectives of all ranks match. Values
    that the task collects in its attributes must not include this sample. Numbers, strings, tensors, lists, dicts, sets
    and deques are restored.
    """
    attributes = vars(owner)
    saved_values = {name: value for name, value in attributes.items() if name not in _UNTOUCHED and _is_plain(value)}
    restores = [restore for value in saved_values.values() if (restore := _remember(value)) is not None]
    try:
        yield
    finally:
        for restore in restores:
            restore()
        attributes.update(saved_values)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*_NUMBERS, Tensor, list, dict, set, deque))


def _remember(value: Any) -> Callable[[], Any] | None:
    """Return a function that restores the current content of a tensor or collection; None for any other value."""
    if isinstance(value, nn.Parameter):
        return None
    if isinstance(value, Tensor):
        return functools.partial(value.detach().copy_, value.detach().clone())
    if not isinstance(value, (list, dict, set, deque)):
        return None
    items = value.copy()
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    restores = [r for item in inner if (r := _remember(item)) is not None] if len(value) <= _MOST else []

    def restore() -> None:
        value.clear()
        value.extend(items) if isinstance(value, (list, deque)) else value.update(items)
        for restore_item in restores:
            restore_item()

    return restore


# -- ranks with unequal numbers of batches -----------------------------------------------------------------------------

# torchmetrics gathers a list state tensor by tensor, unless its reduction is "cat". If such lists have unequal
# lengths, ranks hang or mix up items. For a rank without data, torchmetrics sends an empty vector, even if the other
# ranks' tensors have more dimensions or another dtype. These problems do not occur if samples are repeated until all
# ranks have the same number. Treadle counts each sample once, so some ranks may have no share of the last batches.


@contextmanager
def uneven_counts(owner: nn.Module, world: World) -> Iterator[None]:
    """Return a context in which ``compute()`` works even if some ranks have updated a metric more often than others.

    Args:
        owner: The module that contains the torchmetrics objects, usually the task.
        world: The processes that compute the metrics.
    """
    metrics = [] if world.size == 1 else [m for m in find(owner).values() if _gathers_lists(m)]
    for metric in metrics:
        metric._sync_dist = functools.partial(_sync_dist, metric, world)
    try:
        yield
    finally:
        for metric in metrics:
            vars(metric).pop("_sync_dist", None)


def _gathers_lists(metric: Any) -> bool:
    if getattr(metric, "process_group", None) is not None:  # the metric is reduced over ranks that the task chooses
        return False
    return hasattr(type(metric), "_sync_dist") and any(isinstance(state, list) for state in metric._defaults.values())


def _describe_list(items: list[Tensor]) -> tuple[int, tuple[int, ...], torch.dtype | None]:
    """Return the length of a list state, and the shape and dtype of a filler: a tensor without rows, or a 0-d one."""
    if not items:
        return 0, (), None
    first = items[0]
    return len(items), (0, *first.shape[1:]) if first.ndim else (), first.dtype


def _sync_dist(metric: Any, world: World, *args: Any, **kwargs: Any) -> None:
    """Call the metric's own ``_sync_dist`` with lists padded to equal length, and remove the padding afterwards."""
    lists = {name: items for name in metric._defaults if (items := _read_list(metric, name)) is not None}
    every = world.gather_objects({name: _describe_list(items) for name, items in lists.items()})
    filled: dict[str, list[int]] = {}
    for name, items in lists.items():
        forms = [part[name] for part in every if name in part]
        if len(forms) < len(every):
            continue  # some rank's list contains other objects than tensors: the metric gathers it separately
        longest, shape, dtype = max(forms, key=lambda form: form[0])
        if len(items) < longest:
            items = items + [torch.zeros(shape, dtype=dtype, device=metric.device)] * (longest - len(items))
        setattr(metric, name, items)
        filled[name] = [length for length, *_ in forms]
    type(metric)._sync_dist(metric, *args, **kwargs)
    for name, lengths in filled.items():
        gathered = getattr(metric, name)
        if metric._reductions[name] is None and len(set(lengths)) > 1:  # the first tensor of each rank, the second, ...
            places = ((index, rank) for index in range(max(lengths)) for rank in range(len(lengths)))
            kept = [index < lengths[rank] for index, rank in places]
            setattr(metric, name, [item for item, keep in zip(gathered, kept, strict=True) if keep])


def _read_list(metric: Any, name: str) -> list[Tensor] | None:
    """Return the tensors of a list state, concatenated if the reduction concatenates them; None for other states."""
    items, reduction = getattr(metric, name), metric._reductions[name]
    concatenated = getattr(reduction, "__name__", "") == "dim_zero_cat"
    if not isinstance(metric._defaults[name], list) or not (reduction is None or concatenated):
        return None
    if concatenated and isinstance(items, Tensor):  # concatenated by an earlier compute()
        items = [items]
    if not isinstance(items, list) or not all(isinstance(item, Tensor) for item in items):
        return None
    return [torch.cat([torch.atleast_1d(item) for item in items])] if concatenated and items else items
