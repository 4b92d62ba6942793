"""Logged values: taken as they come, reduced over steps and processes in bulk.

`Metrics.log` appends; it never waits for the device and never talks to another process. Every ``log_every_n_steps``,
and when an epoch ends, everything is packed into one vector, exchanged once and read once.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from ..strategies import World, nearest
from . import metric_objects
from .entry import FOLD, FOLDS, SHOWN, Entry, stack

_REDUCTIONS = ("mean", "sum", "min", "max")


class Metrics:
    """Everything that is logged in one stage.

    Args:
        training: decides the defaults: steps of training log the step's value, everything else the epoch's mean.

    Attributes:
        weight: samples of the batch that is being worked on; a value weighs that much in its epoch mean.
        suffix: added to names while several evaluation loaders are worked through.
        evaluation: what is logged in an evaluation within this stage, while it runs.
    """

    def __init__(self, training: bool) -> None:
        self.training = training
        self.weight: float = 1.0
        self.suffix = ""
        self.evaluation: Metrics | None = None
        self._in_step: dict[str, Entry] = {}
        self._in_epoch: dict[str, Entry] = {}
        self._entries = self._in_step

    def between_batches(self, yes: bool) -> None:
        """Say whether the hooks that run now belong to the epoch rather than to a batch."""
        self._entries = self._in_epoch if yes else self._in_step
        if yes:
            self.weight = 1.0  # a process's value, not a batch's

    @property
    def entries(self) -> list[Entry]:
        """All entries, in the order they were first logged."""
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
        """Take one value; see ``TaskModule.log``."""
        if self.suffix and add_suffix:
            name += self.suffix
        entry = self._entries.get(name)
        spec = (prog_bar, logger, on_step, on_epoch, reduce_fx)
        if entry is None or entry.spec != spec:
            entry = self._register(name, value, spec)
        if isinstance(value, Tensor):
            if value.ndim:
                value = _one_number(name, value)
            if value.is_cpu:
                value = value.item()  # nothing to wait for, and a fifth of what detaching costs
            else:
                # A parameter, or a tensor the user counts in, changes later; what an operation has just made does not.
                value = value.detach() if value.grad_fn is not None else value.detach().clone()
        elif entry.metric is not None and isinstance(value, type(entry.metric)):
            entry.metric = value
            value = getattr(value, "_forward_cache", None)
        elif value.__class__ is not float and value.__class__ is not int:
            value = _one_number(name, value)
        weight = self.weight if batch_size is None else batch_size
        entry.last = value
        entry.last_weight = weight
        if entry.on_epoch and entry.metric is None:
            entry.values.append(value)
            entry.weights.append(weight)
            if len(entry.values) >= FOLD:
                entry.fold()

    def _register(self, name: str, value: Any, spec: tuple[Any, ...]) -> Entry:
        known = self._entries.get(name)
        if known is not None and known.spec is not None:
            raise ValueError(
                f"{name!r} was logged twice in one stage with different arguments; give one of them another name."
            )
        if not isinstance(name, str):
            raise TypeError(f"self.log takes a name and a value; the name {name!r} is a {type(name).__name__}.")
        prog_bar, logger, on_step, on_epoch, reduce_fx = spec
        per_step = self.training and self._entries is self._in_step
        reduction = getattr(reduce_fx, "__name__", reduce_fx)
        reduction = {"amin": "min", "amax": "max"}.get(reduction, reduction)
        if reduction not in _REDUCTIONS:
            raise ValueError(
                f"reduce_fx={reduce_fx!r} of {name!r} is not one of {', '.join(_REDUCTIONS)}."
                f"{nearest(str(reduction), _REDUCTIONS)} Anything else is a torchmetrics.Metric's business."
            )
        on_step = per_step if on_step is None else on_step
        on_epoch = not per_step if on_epoch is None else on_epoch
        if self._entries is self._in_epoch and on_step:
            raise ValueError(f"{name!r} is logged between batches, where there is no step: leave on_step out.")
        entry = Entry(
            name,
            spec,
            on_step=on_step,
            on_epoch=on_epoch,
            reduction=reduction,
            prog_bar=prog_bar,
            logger=logger is not False,
        )
        if hasattr(value, "compute") and hasattr(value, "reset"):
            entry.metric = value
        if known is not None:  # restored from a checkpoint
            entry.total, entry.total_weight = known.total, known.total_weight
            entry.values, entry.weights = known.values, known.weights
        self._entries[name] = entry
        return entry

    # -- reading -------------------------------------------------------------------------------------------------

    def step_values(self, world: World) -> list[tuple[Entry, float]]:
        """The latest step's values over all processes; one exchange. All processes must ask."""
        entries = [entry for entry in self._in_step.values() if entry.on_step and entry.last is not None]
        return self._reduced(entries, [entry.step_pair() for entry in entries], world)

    def epoch_values(self, world: World) -> list[tuple[Entry, float]]:
        """The values of the epoch over all batches and processes; one exchange. All processes must ask."""
        entries = [entry for entry in self.entries if entry.on_epoch]
        plain = [entry for entry in entries if entry.metric is None]
        values = dict(self._reduced(plain, [entry.epoch_pair() for entry in plain], world, entries))
        for entry in entries:
            if entry.metric is not None:  # exchanges its own state
                values[entry] = _computed(entry)
        return [(entry, values[entry]) for entry in entries if entry in values]

    def local_values(self) -> dict[str, float]:
        """This process's latest values of what the progress bar shows. Reads the device."""
        return {
            entry.label("step"): float(entry.last)
            for entry in self._in_step.values()
            if entry.prog_bar and entry.on_step and entry.last is not None
        }

    def latest(self) -> dict[str, Any]:
        """This process's latest step values, still on the device."""
        return {
            entry.label("step"): entry.last
            for entry in self._in_step.values()
            if entry.on_step and entry.last is not None
        }

    def reset(self) -> None:
        """Forget everything: another epoch begins."""
        for entry in self.entries:
            if entry.metric is not None and entry.on_epoch:
                entry.metric.reset()
        self._in_step.clear()
        self._in_epoch.clear()
        self._entries = self._in_step
        self.evaluation = None

    @staticmethod
    def _reduced(
        entries: list[Entry], pairs: list[tuple[Any, float]], world: World, compared: list[Entry] | None = None
    ) -> list[tuple[Entry, float]]:
        if world.size > 1:  # metric objects exchange their own state, on every rank or on none
            _same_names([f"{entry.name} ({entry.reduction})" for entry in compared or entries], world)
        if not entries:
            return []
        flat = [value for value, _ in pairs] + [weight for _, weight in pairs]
        if world.size > 1 or any(isinstance(value, Tensor) for value in flat):
            packed = stack(flat)
            parts = [part.tolist() for part in world.all_gather(packed.to(world.device) if world.size > 1 else packed)]
        else:
            parts = [flat]
        count = len(entries)
        results = []
        for index, entry in enumerate(entries):
            known = [(part[index], part[count + index]) for part in parts if part[count + index]]
            if not known:
                continue
            if entry.reduction == "mean":
                value = sum(v for v, _ in known) / sum(w for _, w in known)
            else:  # in torch: Python's min and max drop a NaN or keep it, depending on its place
                value = FOLDS[entry.reduction](torch.tensor([v for v, _ in known], dtype=torch.float64)).item()
            results.append((entry, value))
        return results

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self, world: World, owner: nn.Module | None = None, over: bool = False) -> dict[str, Any]:
        """The epoch's sums and the latest step's values, how each is shown, and what ``owner``'s metrics have counted.

        All processes must ask. ``over`` says that the epoch is at its end: the next one has logged nothing yet.
        """
        objects = {} if owner is None else metric_objects.find(owner)
        done = [e.metric for e in self.entries if e.on_epoch] if over else []
        done += [] if self.evaluation is None else [e.metric for e in self.evaluation.entries]
        counts = metric_objects.state(objects, metric_objects.parts_of(done), world)
        if over:
            return {"values": {}, "metrics": {}, "latest": {}, "objects": counts}
        shown = {e.name: {key: getattr(e, key) for key in SHOWN} for e in self._in_step.values()}
        logged = {e.name: e.metric for e in self._in_step.values() if e.on_epoch and e.metric is not None}
        places = metric_objects.places(logged, objects, owner)
        entries = self._in_step.values()
        sums = {e.name: e.part() for e in entries if e.on_epoch and e.metric is None}
        newest = {e.name: e.latest() for e in entries if e.on_step and e.last is not None}
        every = world.gather_objects((sums, newest))
        return {
            "values": {name: shown[name] | {"parts": [part.get(name) for part, _ in every]} for name in sums},
            "metrics": {name: shown[name] | {"place": place} for name, place in places.items()},
            "latest": {name: shown[name] | {"parts": [part.get(name) for _, part in every]} for name in newest},
            "objects": counts,
        }

    def load_state_dict(self, state: dict[str, Any], world: World, owner: nn.Module | None = None) -> None:
        """Go on from what `state_dict` returned; on another number of processes rank zero goes on from all sums."""
        self._in_step.clear()
        self._in_epoch.clear()
        self.evaluation = None
        objects = {} if owner is None else metric_objects.find(owner)
        metric_objects.load(objects, state["objects"], world)
        for name, one in (state["values"] | state["metrics"]).items():
            entry = self._in_step[name] = Entry(name, None, **{key: one[key] for key in SHOWN})
            if "place" in one:
                entry.metric = objects.get(one["place"])
            else:
                entry.take(_own(one["parts"], world))
        for name, one in state.get("latest", {}).items():
            entry = self._in_step.setdefault(name, Entry(name, None, **{key: one[key] for key in SHOWN}))
            entry.take_latest(_own(one["parts"], world))


class MutedMetrics(Metrics):
    """Takes everything and keeps nothing."""

    def log(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


def _own(parts: list[Any], world: World) -> list[Any]:
    """What this process goes on from: its own part, or where there were more or fewer, all of them on rank zero."""
    mine = parts[world.rank : world.rank + 1] if len(parts) == world.size else parts if world.is_main else []
    return [part for part in mine if part]


def _one_number(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return value.reshape(())
        raise ValueError(
            f"self.log({name!r}) takes one number, but the tensor has shape {tuple(value.shape)}: log its mean, or "
            "another reduction of it."
        )
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"self.log({name!r}) takes a number, a tensor with one element or a torchmetrics.Metric, not "
            f"{type(value).__name__}: {value!r}."
        ) from None


def _computed(entry: Entry) -> float:
    value = entry.metric.compute()
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise TypeError(
            f"{entry.name!r} was logged as a {type(entry.metric).__name__}, whose compute() returned {what}: log takes "
            "one number. Call compute() in the epoch's last hook and log its parts."
        ) from None


def _same_names(names: list[str], world: World) -> None:
    """Raise on every process if they log different names; vectors of different length would hang or mix them up."""
    digest = hashlib.sha256("\0".join(names).encode()).digest()
    mark = torch.tensor([int.from_bytes(digest[:7], "little")], dtype=torch.int64, device=world.device)
    if len({int(part) for part in world.all_gather(mark)}) == 1:
        return
    every = world.gather_objects(names)
    common = set.intersection(*(set(part) for part in every))
    odd = [
        f"rank {rank} alone: {', '.join(sorted(set(part) - common)) or '(nothing)'}" for rank, part in enumerate(every)
    ]
    raise ValueError(
        "the processes logged different names, or in a different order, so they can not be reduced; log the same "
        f"names on every rank. {'; '.join(odd)}"
    )
