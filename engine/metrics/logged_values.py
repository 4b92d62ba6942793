"""Store of logged values, which are reduced over steps and processes."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...common.messages import name_type, nearest, warn
from ...common.validation import WrongTypeError
from ...strategies import World
from ..data import Cursor
from ..rank_consistency import check_values_match
from . import metric_state

_REDUCTIONS = ("mean", "sum", "min", "max")


class Metrics:
    """Store of all values logged in one stage.

    Args:
        training: Whether this is a training stage.
        copies: Whether to copy all logged tensors that are on an accelerator. This is required with CUDA graphs,
            because a replay overwrites the results of the previous one. Default: False.

    Attributes:
        weight: Default weight of a value in its epoch mean, such as the number of samples in the current batch.
        suffix: Suffix that identifies the evaluation dataloader in logged names.
        place: The current batch of an evaluation, as (dataloader index, batch index).
        evaluation: The values of the evaluation that is running within this stage; None at other times.

    Examples:
        >>> import treadle
        >>> from treadle.engine import Metrics
        >>> world = treadle.PartialState(cpu=True).world
        >>> metrics = Metrics(training=True)
        >>> for loss in (1.0, 3.0):
        ...     metrics.log("loss", loss, False, None, None, True, "mean", None)
        >>> [(entry.label("epoch"), value) for entry, value in metrics.epoch_values(world)]
        [('loss_epoch', 2.0)]
    """

    def __init__(self, training: bool, copies: bool = False) -> None:
        self.training = training
        self.copies = copies
        self.weight: float = 1.0
        self.suffix = ""
        self.place: Place = (0, 0)
        self.evaluation: Metrics | None = None
        self._in_step: dict[str, Entry] = {}
        self._in_epoch: dict[str, Entry] = {}
        self._entries = self._in_step

    def between_batches(self, yes: bool) -> None:
        """Set whether values logged from now on belong to the epoch rather than to a batch.

        Args:
            yes: True for the epoch, False for a batch.
        """
        self._entries = self._in_epoch if yes else self._in_step
        if yes:
            self.weight = 1.0  # the weight of a process's value, not of a batch's

    def counted(self, batches: Iterable[Any], cursor: Cursor, owner: nn.Module) -> Iterator[Any]:
        """Yield batches, and undo the changes that placeholder batches make to metric objects.

        A process gets a placeholder batch if its share of a global batch is empty. The placeholder repeats samples that
        are counted in another batch, so that all processes run the same collectives. In an evaluation, changes to the
        plain attributes of ``owner`` are undone as well.

        Args:
            batches: The batches of a prepared dataloader.
            cursor: The position of the loop over ``batches``.
            owner: The task that processes the batches.
        """
        for batch in batches:
            if cursor.micro is None or cursor.micro.samples:
                yield batch
                continue
            objects = [*metric_state.find(owner).values()]
            part_ids = metric_state.collect_part_ids(objects)
            objects += [e.metric for e in self.entries if e.metric is not None and id(e.metric) not in part_ids]
            values = nullcontext() if self.training else metric_state.preserve_values(owner)
            with metric_state.preserve_counts(objects), values:
                yield batch

    @property
    def entries(self) -> list[Entry]:
        """All entries: first those logged in batches, then those logged between batches."""
        return [*self._in_step.values(), *self._in_epoch.values()]

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool,
        logger: bool | None,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: Any,
        batch_size: float | None,
        add_suffix: bool = True,
    ) -> None:
        """Record one value; see ``TaskModule.log``.

        Args:
            name: The name to log under.
            value: A number, a tensor with one element or a metric object.
            prog_bar: Show the value in the progress bar.
            logger: Send the value to loggers. None means True.
            on_step: Log the value of each step. None selects the stage's default.
            on_epoch: Log the value over the epoch. None selects the stage's default.
            reduce_fx: ``"mean"``, ``"sum"``, ``"min"``, ``"max"``, or a function with one of these names.
            batch_size: The weight of the value in a mean. None selects the attribute ``weight``.
            add_suffix: Append ``suffix`` to the name. Default: True.

        Raises:
            ValueError: If an argument is invalid or contradicts an earlier call.
            TypeError: If the name or the value has the wrong type.
        """
        if self.suffix and add_suffix:
            name += self.suffix
        entry = self._entries.get(name)
        spec = (prog_bar, logger, on_step, on_epoch, reduce_fx)
        if entry is None or entry.spec != spec:
            entry = self._register(name, value, spec, self.suffix if add_suffix else "")
        if isinstance(value, Tensor):
            if value.ndim:
                value = _to_number(name, value)
            # On the CPU no wait is needed, and a number takes a fifth of the time of detaching.
            value = value.item() if value.is_cpu else self._detach(value)
        elif entry.metric is not None and isinstance(value, type(entry.metric)):
            if value is not entry.metric:
                entry.replace_metric(value)
            value = getattr(value, "_forward_cache", None) if entry.on_step else None
            if value is not None and not (isinstance(value, Tensor) and value.ndim == 0):
                value = _to_number(name, value)
        elif value.__class__ is not float and value.__class__ is not int:
            value = _to_number(name, value)
        if batch_size is not None and not isinstance(batch_size, Tensor) and batch_size < 0:
            raise ValueError(f"self.log({name!r}) got batch_size={batch_size}, but a weight in a mean is at least 0.")
        # A placeholder batch, which keeps the processes in step, has no weight, whatever batch size the user passes.
        weight = batch_size if batch_size is not None and self.weight else self.weight
        entry.last, entry.last_weight = value, weight
        if entry.batches is not None and value is not None:
            entry.batches.add(self.place, value, weight)
        if entry.on_epoch and entry.metric is None:
            entry.values.append(value)
            entry.weights.append(weight)
            if len(entry.values) >= FOLD:
                entry.fold()

    def _make_entry(self, *args: Any, **options: Any) -> Entry:
        return Entry(*args, **options)

    def _detach(self, value: Tensor) -> Tensor:
        """Detach a tensor on an accelerator from its graph; copy it if its memory may be shared or overwritten."""
        # A parameter, or a tensor that the user counts in, changes later; the result of an operation does not. A view
        # would keep its whole base alive, such as the logits of a batch. The next replay of a CUDA graph overwrites its
        # results.
        lasts = value.grad_fn is not None and not value._is_view() and not self.copies
        return value.detach() if lasts else value.detach().clone()

    def _register(self, name: str, value: Any, spec: tuple[Any, ...], suffix: str) -> Entry:
        if not isinstance(name, str):
            raise TypeError(f"self.log got the name {name!r} ({name_type(name)}), but a name must be a string.")
        if isinstance(value, Tensor) and value.is_complex():
            raise TypeError(
                f"self.log({name!r}) got a tensor of type {value.dtype}, but logs only real numbers. Log its .abs(), "
                "or its .real and .imag under two names."
            )
        previous = self._entries.get(name)
        if previous is not None and previous.spec is not None:
            raise ValueError(
                f"{name!r} was logged twice in one stage with different arguments. Pass the same arguments, or use "
                "different names."
            )
        prog_bar, logger, on_step, on_epoch, reduce_fx = spec
        per_step = self.training and self._entries is self._in_step
        on_step = per_step if on_step is None else on_step
        on_epoch = not per_step if on_epoch is None else on_epoch
        if self._entries is self._in_epoch and on_step:
            raise ValueError(
                f"{name!r} is logged with on_step=True outside of a batch, so it has no step. Omit on_step."
            )
        if not (on_step or on_epoch):
            raise ValueError(
                f"{name!r} is logged with on_step=False and on_epoch=False, so its value would be lost. Set "
                "on_epoch=True, or omit on_step."
            )
        entry = self._make_entry(
            name,
            spec,
            on_step=on_step,
            on_epoch=on_epoch,
            reduction=_resolve_reduction(name, reduce_fx),
            prog_bar=prog_bar,
            logger=logger is not False,
            suffix=suffix,
        )
        entry.wide = is_wide(value)
        if on_step and not self.training:
            entry.batches = BatchValues()
        if hasattr(value, "compute") and hasattr(value, "reset"):
            entry.metric, entry.wide = value, False
            if on_step and getattr(value, "_forward_cache", None) is None:
                warn(
                    f"{name!r} is logged with on_step=True, but {type(value).__name__}.update() does not compute a "
                    "value for the step. Call the metric itself, metric(...), or log with on_step=False, on_epoch=True."
                )
        in_batch = self._entries is self._in_step
        other = (self._in_epoch if in_batch else self._in_step).get(name)
        if other is not None and other.spec is not None:
            warn(
                f"{name!r} is logged both within batches and between them, so the later of the two values replaces the "
                "other in callback_metrics. Use two names."
            )
        if previous is not None:  # restored from a checkpoint
            entry.take([previous.part()])
        self._entries[name] = entry
        return entry

    # -- reading -------------------------------------------------------------------------------------------------

    def step_values(self, world: World, written: dict[str, float] | None = None) -> list[tuple[Entry, float]]:
        """Return the latest step's values, reduced over all processes. Must be called on all ranks.

        Args:
            world: The processes to reduce over.
            written: Numbers that this rank's user wrote, by name. The numbers of the lowest rank that wrote a name
                replace those of other ranks. Default: None, on all ranks.

        Raises:
            ValueError: On every rank, if the ranks have logged different names, or the same names in different orders.
        """
        entries = self._list_latest()
        return self._reduce_entries(entries, [entry.step_pair() for entry in entries], world, written=written)

    def epoch_values(self, world: World) -> list[tuple[Entry, float]]:
        """Return the epoch's values, reduced over all batches and processes. Must be called on all ranks.

        Args:
            world: The processes to reduce over.

        Raises:
            ValueError: On every rank, if the ranks have logged different names, or the same names in different orders.
            TypeError: If ``compute()`` of a metric object does not return a single number.
        """
        entries = [entry for entry in self.entries if entry.on_epoch]
        plain = [entry for entry in entries if entry.metric is None]
        # Metric objects and the values of batches are exchanged separately. They must be the same on all processes,
        # otherwise the exchange hangs.
        exchanged_apart = [entry for entry in self.entries if entry.metric is not None or entry.batches is not None]
        values = dict(self._reduce_entries(plain, [entry.epoch_pair() for entry in plain], world, exchanged_apart))
        # A metric object exchanges its own state.
        values |= {entry: _compute_number(entry) for entry in entries if entry.metric is not None}
        return [(entry, values[entry]) for entry in entries if entry in values]

    def batch_values(self, world: World) -> list[tuple[Place, list[tuple[Entry, float]]]]:
        """Return the values that an evaluation logged for each batch, reduced over all processes.

        Must be called on all ranks, after `epoch_values`.

        Args:
            world: The processes to reduce over.

        Returns:
            One tuple ``((dataloader index, batch index), [(entry, value), ...])`` per batch, in order.
        """
        entries = [entry for entry in self._in_step.values() if entry.batches is not None]
        if not entries:
            return []
        every = world.gather_objects([entry.batches.read() for entry in entries])  # type: ignore[union-attr]
        rows: dict[Place, list[tuple[Entry, float]]] = {}
        for entry, *parts in zip(entries, *every, strict=True):
            pairs_by_place: dict[Place, list[tuple[float, float]]] = {}
            for place, value, weight in itertools.chain.from_iterable(parts):
                if weight:
                    weighed = value * weight if entry.reduction == "mean" else value
                    pairs_by_place.setdefault(place, []).append((weighed, weight))
            for place, pairs in pairs_by_place.items():
                rows.setdefault(place, []).append((entry, entry.reduced(pairs)))
        return sorted(rows.items())

    def bar_values(self) -> dict[str, Any]:
        """Return this process's latest step values for the progress bar, by label. Tensors may be on the device."""
        return {entry.label("step"): entry.last for entry in self._list_latest() if entry.prog_bar}

    def latest(self) -> dict[str, Any]:
        """Return this process's latest step values, by label. Tensors may be on the device."""
        return {entry.label("step"): entry.last for entry in self._list_latest()}

    def _list_latest(self) -> list[Entry]:
        return [entry for entry in self._in_step.values() if entry.on_step and entry.last is not None]

    def wide_names(self) -> set[str]:
        """Return the labels of the step values that may have more than float32's precision; see `Entry`."""
        return {name for entry in self._in_step.values() if entry.wide for name in (entry.label("step"), entry.name)}

    def latest_of_both(self) -> dict[str, Any]:
        """Return the latest step values of entries logged both per step and per epoch, by name without ``_step``."""
        return {entry.name: entry.last for entry in self._list_latest() if entry.on_epoch}

    def step_label(self, name: str) -> str:
        """Return the label under which the step value of ``name`` is logged; ``name`` itself if it is not logged.

        Args:
            name: The name passed to `log`.
        """
        entry = self._in_step.get(name)
        return name if entry is None else entry.label("step")

    def reset(self) -> None:
        """Discard all values and reset the logged metric objects."""
        for entry in self.entries:
            if entry.metric is not None:
                entry.metric.reset()
        self._in_step.clear()
        self._in_epoch.clear()
        self._entries = self._in_step
        self.evaluation = None

    @staticmethod
    def _check_names(
        entries: list[Entry], world: World, exchanged_apart: Iterable[Entry], written: dict[str, float] | None
    ) -> None:
        if world.size > 1:
            names = [f"{entry.name} ({entry.reduction})" for entry in (*entries, *exchanged_apart)]
            _check_names_match(names, world, {} if written is None else written)

    @staticmethod
    def _reduce_entries(
        entries: list[Entry],
        pairs: list[tuple[Any, float]],
        world: World,
        exchanged_apart: Iterable[Entry] = (),
        written: dict[str, float] | None = None,
    ) -> list[tuple[Entry, float]]:
        Metrics._check_names(entries, world, exchanged_apart, written)
        if not entries:
            return []
        flat = [value for value, _ in pairs] + [weight for _, weight in pairs]
        if world.size > 1 or any(isinstance(value, Tensor) for value in flat):
            packed = stack_numbers(flat)
            parts = torch.stack(world.all_gather(packed.to(world.device) if world.size > 1 else packed)).tolist()
        else:
            parts = [flat]
        count = len(entries)
        results = []
        for index, entry in enumerate(entries):
            weighted_pairs = [(part[index], part[count + index]) for part in parts if part[count + index]]
            if weighted_pairs:
                results.append((entry, entry.reduced(weighted_pairs)))
        return results

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(
        self, world: World, owner: nn.Module | None = None, over: bool = False, *, read: bool = True
    ) -> dict[str, Any]:
        """Return the values of the epoch and the state of metric objects. Must be called on all ranks.

        Args:
            world: The processes whose values are included.
            owner: The task whose metric objects are included. Default: None, which includes no metric object.
            over: Whether the epoch has ended. If True, no logged values are included. Default: False.
            read: Return the logged values as plain numbers. If False, they stay on the device until the state is passed
                to `read_numbers`. Default: True.
        """
        objects = {} if owner is None else metric_state.find(owner)
        done = [e.metric for e in self.entries] if over else []
        done += [] if self.evaluation is None else [e.metric for e in self.evaluation.entries]
        counts = metric_state.collect_states(objects, metric_state.collect_part_ids(done), world)
        if over:
            return {"values": {}, "metrics": {}, "latest": {}, "objects": counts}
        shown = {e.name: {key: getattr(e, key) for key in SHOWN} for e in self._in_step.values()}
        object_ids = {id(metric) for metric in objects.values()}
        logged = {
            e.name: e.metric
            for e in self._in_step.values()
            if e.metric is not None and (e.on_epoch or id(e.metric) in object_ids)
        }
        places = metric_state.find_places(logged, objects, owner)
        entries = self._in_step.values()
        sums = {e.name: e.part() for e in entries if e.on_epoch and e.metric is None}
        newest = {e.name: e.latest() for e in self._list_latest()}
        every = world.gather_objects(read_numbers((sums, newest)) if read else (sums, newest))
        return {
            "values": {name: shown[name] | {"parts": [part.get(name) for part, _ in every]} for name in sums},
            "metrics": {name: shown[name] | {"place": place} for name, place in places.items()},
            "latest": {name: shown[name] | {"parts": [part.get(name) for _, part in every]} for name in newest},
            "objects": counts,
        }

    def load_state_dict(self, state: dict[str, Any], world: World, owner: nn.Module | None = None) -> None:
        """Restore a state returned by `state_dict`. The world size may have changed.

        Args:
            state: A state returned by `state_dict`.
            world: The processes of the current run.
            owner: The task whose metric objects are restored. Default: None, which restores no metric object.

        Raises:
            ValueError: If the world size has changed and the state of a metric object cannot be split over the ranks.
        """
        self._in_step.clear()
        self._in_epoch.clear()
        self.evaluation = None
        objects = {} if owner is None else metric_state.find(owner)
        metric_state.load(objects, state["objects"], world)
        for name, saved in (state["values"] | state["metrics"]).items():
            entry = self._in_step[name] = self._make_entry(name, None, **{key: saved[key] for key in SHOWN})
            if "place" in saved:
                entry.metric = objects.get(saved["place"])
            else:
                entry.take(_select_parts(saved["parts"], world))
        for name, saved in state["latest"].items():
            entry = self._in_step.setdefault(name, self._make_entry(name, None, **{key: saved[key] for key in SHOWN}))
            entry.take_latest(_select_parts(saved["parts"], world))


class MutedMetrics(Metrics):
    """Subclass of `Metrics` whose `log` discards all values."""

    def log(self, *_: Any, **__: Any) -> None:
        """Discard the logged value."""


def _select_parts(parts: list[Any], world: World) -> list[Any]:
    """Select the saved states that this process loads: its own, or all on rank zero if the world size has changed."""
    mine = parts[world.rank : world.rank + 1] if len(parts) == world.size else parts if world.is_main else []
    return [part for part in mine if part]


def _resolve_reduction(name: str, reduce_fx: Any) -> str:
    reduction = getattr(reduce_fx, "__name__", reduce_fx)
    if isinstance(reduction, str):
        reduction = {"amin": "min", "amax": "max", "avg": "mean"}.get(reduction.lower(), reduction.lower())
    if not isinstance(reduction, str) or reduction not in _REDUCTIONS:
        raise ValueError(
            f"reduce_fx={reduce_fx!r} for {name!r} is not one of {', '.join(_REDUCTIONS)}."
            f"{nearest(str(reduction), _REDUCTIONS)} For any other reduction, log a torchmetrics.Metric."
        )
    return reduction


def _to_number(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return value.reshape(())
        raise ValueError(
            f"self.log({name!r}) got a tensor of shape {tuple(value.shape)}, but can log only one number. Log its "
            "mean, or another reduction."
        )
    try:
        return float(value)
    except (TypeError, ValueError):
        described = "None" if value is None else f"{value!r} ({name_type(value)})"
        raise WrongTypeError(
            f"self.log({name!r}) got {described}. Log a number, a tensor with one element or a torchmetrics.Metric."
        ) from None


def is_wide(value: Any) -> bool:
    """Return whether float32 may round a value: a float64 tensor, an integer or a Python number."""
    return not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype is torch.float64


def _compute_number(entry: Entry) -> float:
    value = entry.metric.compute()
    entry.wide = getattr(value, "dtype", torch.float64) is torch.float64
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        returned = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{name_type(value)}"
        raise TypeError(
            f"{entry.name!r} was logged as {name_type(entry.metric)}, whose compute() returned {returned}, but "
            "log needs one number. Call compute() in on_train_epoch_end or on_validation_epoch_end, and log each of "
            "the returned values."
        ) from None


def _check_names_match(names: list[str], world: World, written: dict[str, float]) -> None:
    """Raise a ValueError on every process if the names or their order differ between the processes.

    The exchange of the values could then hang or mix them up. In the same collective, agree on the ``written`` numbers.
    """
    digest = hashlib.sha256("\0".join([*names, *map(repr, sorted(written.items()))]).encode()).digest()
    mark = torch.tensor([int.from_bytes(digest[:7], "little")], dtype=torch.int64, device=world.device)
    if len(set(torch.cat(world.all_gather(mark)).tolist())) == 1:
        return
    every, numbers = zip(*world.gather_objects((names, written)), strict=True)
    written.update({name: value for rank_numbers in reversed(numbers) for name, value in rank_numbers.items()})
    if any(part != names for part in every):
        check_values_match(
            "the ranks logged different names, or the same names in different orders",
            dict.fromkeys(names, "logged"),
            world,
            "Log the same names in the same order on every rank.",
        )


SHOWN = ("on_step", "on_epoch", "reduction", "prog_bar", "logger")
"""Attributes of an `Entry` that a checkpoint contains, besides its values."""

Place = tuple[int, int]
"""A batch of an evaluation, as (index of the loader, index of the batch in this loader)."""
FOLD = 64  # 0-d tensors kept before they are summed: stacking them in one call is cheaper than adding each


@dataclass(slots=True, eq=False)
class Entry:
    """Values recorded under one logged name, and their reduction.

    Args:
        name: The logged name, including ``suffix``.
        spec: The logging options passed to `Metrics.log`; None if the entry was restored from a checkpoint.
        on_step: Log the value of each step.
        on_epoch: Log the value over the epoch.
        reduction: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.
        prog_bar: Show the value in the progress bar.
        logger: Send the value to loggers.
        suffix: The part of ``name`` that identifies the evaluation dataloader. Default: "".

    Attributes:
        wide: Whether the values may have more than float32's precision; see `is_wide`.

    Examples:
        >>> from treadle.engine import Entry
        >>> options = dict(reduction="mean", prog_bar=False, logger=True)
        >>> Entry("loss", None, on_step=True, on_epoch=True, **options).label("step")
        'loss_step'
    """

    name: str
    spec: tuple[Any, ...] | None
    _: KW_ONLY
    on_step: bool
    on_epoch: bool
    reduction: str
    prog_bar: bool
    logger: bool
    suffix: str = ""
    metric: Any = None
    batches: BatchValues | None = None
    last: Any = None
    last_weight: float = 0.0
    values: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    total: Any = None
    total_weight: float = 0.0
    wide: bool = False

    def fold(self) -> None:
        """Merge the recorded values into the total, and discard the individual values."""
        weighted_pairs = [(v, w) for v, w in zip(self.values, self.weights, strict=True) if w]
        self.values.clear()
        self.weights.clear()
        if not weighted_pairs:
            return
        values = stack_numbers([value for value, _ in weighted_pairs])
        weights = _copy_to(
            values.device, torch.tensor([w for _, w in weighted_pairs], dtype=values.dtype, device="cpu")
        )
        if self.reduction == "mean":
            folded = (values * weights).sum()
        else:
            folded = FOLDS[self.reduction](values)
        self.total = folded if self.total is None else COMBINE[self.reduction](self.total.to(folded.device), folded)
        self.total_weight += sum(w for _, w in weighted_pairs)

    def replace_metric(self, metric: Any) -> None:
        """Replace the metric object with another object logged under the same name.

        Args:
            metric: The new object.

        Raises:
            ValueError: If ``on_epoch`` is True, because the epoch's value would omit the previous object.
        """
        if self.on_epoch:
            raise ValueError(
                f"{self.name!r} was logged as two {type(metric).__name__} objects in one epoch, so its value would be "
                "that of the last object only. Log a single object, kept as an attribute of the task, or use two "
                "names."
            )
        self.metric = metric

    def part(self) -> tuple[Any, float, list[Any], list[float]]:
        """Return the total, its weight, and the values and weights that the total does not include yet."""
        return self.total, self.total_weight, list(map(_plain, self.values)), list(self.weights)

    def latest(self) -> tuple[Any, float]:
        """Return the latest step's value and its weight; the value may be on the device."""
        return (0.0, 0.0) if self.last is None else (_plain(self.last), float(self.last_weight))

    def take_latest(self, parts: Iterable[tuple[float, float]]) -> None:
        """Restore the latest value from the results of `latest`.

        Args:
            parts: Results of `latest`, one per process.
        """
        weighted_pairs = [(value, weight) for value, weight in parts if weight]
        is_mean = self.reduction == "mean"
        self.last, self.last_weight = 0.0, float(sum(weight for _, weight in weighted_pairs))
        if len(weighted_pairs) == 1:
            self.last = weighted_pairs[0][0]  # exactly: multiplying it by its weight and dividing it again may round
        elif weighted_pairs:
            self.last = self.reduced([(v * weight if is_mean else v, weight) for v, weight in weighted_pairs])

    def take(self, parts: Iterable[Any]) -> None:
        """Restore the values of the epoch from the results of `part`.

        Args:
            parts: Results of `part`, one per process.
        """
        for total, weight, values, weights in parts:
            if total is not None:
                total_tensor = stack_numbers([total])[0]
                self.total = total_tensor if self.total is None else COMBINE[self.reduction](self.total, total_tensor)
                self.total_weight += weight
            self.values += values
            self.weights += weights

    def epoch_pair(self) -> tuple[Any, float]:
        """Return (total, weight) of the values recorded in this epoch; for a mean, the total is the weighted sum."""
        self.fold()
        return (0.0, 0.0) if self.total is None else (self.total, self.total_weight)

    def step_pair(self) -> tuple[Any, float]:
        """Return (value, weight) of the latest step; for a mean, the value is multiplied by the weight."""
        if self.last is None or not self.last_weight:
            return 0.0, 0.0
        if self.reduction != "mean":
            return self.last, self.last_weight
        # In float64, in which multiplying a float32 by its weight and dividing it again gives the same number.
        if not isinstance(self.last, Tensor):
            return float(self.last) * self.last_weight, self.last_weight
        return stack_numbers([self.last])[0] * self.last_weight, self.last_weight

    def label(self, form: str) -> str:
        """Return the name under which loggers receive a value.

        Args:
            form: ``"step"`` or ``"epoch"``.
        """
        if not (self.on_step and self.on_epoch):
            return self.name
        return f"{self.name.removesuffix(self.suffix)}_{form}{self.suffix}"

    def reduced(self, pairs: list[tuple[float, float]]) -> float:
        """Reduce the (value, weight) pairs of several processes to one number.

        Args:
            pairs: One pair per process. For a mean, each value must be the weighted sum of a process's values.
        """
        if self.reduction == "mean":
            return sum(value for value, _ in pairs) / sum(weight for _, weight in pairs)
        # In torch, because Python's min and max drop or keep a NaN depending on its position.
        return FOLDS[self.reduction](
            torch.tensor([value for value, _ in pairs], dtype=torch.float64, device="cpu")
        ).item()


class BatchValues:
    """Values of single batches, which stay on the device until they are read."""

    def __init__(self) -> None:
        self._latest: dict[Place, tuple[Any, float]] = {}
        self._folded: list[tuple[list[Place], Tensor, list[float]]] = []

    def add(self, place: Place, value: Any, weight: float) -> None:
        """Record a batch's value."""
        self._latest[place] = value, weight
        if len(self._latest) > FOLD:  # 0-d tensors take 512 bytes each on a GPU
            newest = self._latest.popitem()
            self._fold()
            self._latest[newest[0]] = newest[1]

    def _fold(self) -> None:
        values = stack_numbers([value for value, _ in self._latest.values()])
        self._folded.append((list(self._latest), values, [weight for _, weight in self._latest.values()]))
        self._latest.clear()

    def read(self) -> list[tuple[Place, float, float]]:
        """Return (place, value, weight) of each batch as plain numbers."""
        if self._latest:
            self._fold()
        return [
            triple
            for places, values, weights in self._folded
            for triple in zip(places, values.tolist(), weights, strict=True)
        ]


FOLDS: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}

COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda a, b: a + b,
    "sum": lambda a, b: a + b,
    "min": torch.minimum,
    "max": torch.maximum,
}


def read_numbers(value: Any) -> Any:
    """Return nested data with each 0-d tensor replaced by a number; one transfer reads all of them.

    Args:
        value: Nested dicts, lists and tuples.
    """
    tensors: list[Tensor] = []
    _replace_tensors(value, tensors.append)
    numbers = iter(stack_numbers(tensors).tolist() if tensors else ())
    return _replace_tensors(value, lambda tensor: next(numbers))


def _replace_tensors(value: Any, replace: Callable[[Tensor], Any]) -> Any:
    # Not `apply_nested`: the few values of a save need no second file on its way.
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, dict):
        return {key: _replace_tensors(item, replace) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replace_tensors(item, replace) for item in value)
    return value


def _plain(value: Any) -> Any:
    return value if isinstance(value, Tensor) else float(value)


def stack_numbers(values: list[Any]) -> Tensor:
    """Return 0-d tensors and numbers as one float64 vector, or as float32 on MPS, which lacks float64."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    device = next((v.device for v in tensors if v.device.type != "cpu"), torch.device("cpu"))
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if not tensors:
        return torch.tensor(values, dtype=dtype, device="cpu")
    of_host = [float(v) for v in values if not isinstance(v, Tensor) or v.device != device]
    numbers = iter(_copy_to(device, torch.tensor(of_host, dtype=dtype, device="cpu")) if of_host else ())
    return torch.stack(
        [
            v.detach().reshape(()).to(dtype) if isinstance(v, Tensor) and v.device == device else next(numbers)
            for v in values
        ]
    )


def _copy_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Copy a host tensor to a device; on CUDA, pin it first so that the host does not wait for the copy."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class AsyncNumbers:
    """Asynchronous reader of numbers that a CUDA device may still be computing.

    Reading the latest numbers at each refresh of a progress bar would wait for all work queued on the device.
    """

    def __init__(self) -> None:
        self._known: dict[str, float] = {}
        self._coming: tuple[list[str], Tensor, torch.cuda.Event] | None = None

    def read(self, values: dict[str, Any]) -> dict[str, float]:
        """Return ``values`` as numbers by name; if one is on a CUDA device, those of the last completed copy.

        Args:
            values: Numbers or 0-d tensors by name.
        """
        if not any(isinstance(value, Tensor) and value.is_cuda for value in values.values()):
            return {name: float(value) for name, value in values.items()}
        if self._coming is not None and self._coming[2].query():
            names, on_host, _ = self._coming
            self._known, self._coming = dict(zip(names, on_host.tolist(), strict=True)), None
        if self._coming is None:
            on_device = stack_numbers(list(values.values()))
            on_host = torch.empty(on_device.shape, dtype=on_device.dtype, device="cpu", pin_memory=True)
            on_host.copy_(on_device, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._coming = list(values), on_host, event
        return {name: number for name, number in self._known.items() if name in values}
