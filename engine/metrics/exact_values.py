"""Store of logged values whose sums do not depend on the number of processes or on the order of the values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...strategies import World
from ..data import Cursor
from .logged_values import Entry, Metrics, read_numbers


def add_exactly(parts: list[float], value: float) -> None:
    """Add a number to an exact sum, which is kept as floats that do not overlap.

    Source: Shewchuk (1997), https://doi.org/10.1007/PL00009321
    """
    kept = 0
    for part in parts:
        larger, smaller = (value, part) if abs(value) >= abs(part) else (part, value)
        value = larger + smaller
        if rest := smaller - (value - larger):
            parts[kept] = rest
            kept += 1
    parts[kept:] = [value]


@dataclass(slots=True, eq=False)
class ExactEntry(Entry):
    """Values recorded under one logged name, whose weighted sum is exact.

    Attributes:
        sums: The exact sum of the epoch's values. For ``"min"`` and ``"max"``, a single value.
        weight_sums: The exact sum of the weights.
        step: The step that ``in_step`` belongs to.
        in_step: The values and weights of this process's micro-batches in the latest step.
    """

    sums: list[float] = field(default_factory=list)
    weight_sums: list[float] = field(default_factory=list)
    step: int = -1
    in_step: list[tuple[Any, float]] = field(default_factory=list)

    def fold(self) -> None:
        """Add the recorded values to the exact sums, and discard the individual values."""
        values: list[float] = read_numbers(self.values)
        for value, weight in zip(values, self.weights, strict=True):
            if weight:
                self._add(value * weight if self.reduction == "mean" else value, weight)
        self.values.clear()
        self.weights.clear()

    def _add(self, value: float, weight: float) -> None:
        if self.reduction in ("min", "max") and self.sums:
            self.sums[0] = self.combine([self.sums[0], value], [])
        else:
            add_exactly(self.sums, value)
        add_exactly(self.weight_sums, weight)

    def combine(self, values: Iterable[float], weights: Iterable[float]) -> float:
        """Return the reduction of values, which for a mean are multiplied by their weights."""
        if self.reduction in ("min", "max"):
            return self.reduced([(value, 1.0) for value in values])
        total = math.fsum(values)
        return total / math.fsum(weights) if self.reduction == "mean" else total

    def part(self) -> tuple[Any, Any, list[Any], list[float]]:
        """Return the exact sums, as a total and its weight, and no further values."""
        self.fold()
        return list(self.sums), list(self.weight_sums), [], []

    def take(self, parts: Iterable[Any]) -> None:
        """Restore the values of the epoch from the results of `part`, or of that of `Entry`."""
        for total, weight, values, weights in parts:
            if isinstance(total, list):
                for number in total:
                    self._add(number, 0.0)
                for number in weight:
                    add_exactly(self.weight_sums, number)
            elif total is not None:
                self._add(float(total), weight)
            self.values += values
            self.weights += weights

    def epoch_pair(self) -> tuple[Any, Any]:
        """Return the exact sums of the values recorded in this epoch, and of their weights."""
        self.fold()
        return self.sums, self.weight_sums

    def take_latest(self, parts: Iterable[tuple[float, float]]) -> None:
        """Restore the latest value from the results of `latest`."""
        Entry.take_latest(self, parts)
        self.in_step = [(self.last, self.last_weight)]


class ExactMetrics(Metrics):
    """Store of the values logged by micro-batches of a `FixedTree`.

    A step's value covers all of its micro-batches. Sums are exact until they are rounded once, so it does not matter
    which process has logged which value.

    Args:
        cursor: Position of the loop.
        training: Whether this is a training stage.
        copies: See `Metrics`.
    """

    def __init__(self, cursor: Cursor, training: bool, copies: bool = False) -> None:
        super().__init__(training, copies=copies)
        self._cursor = cursor

    def _make_entry(self, *args: Any, **options: Any) -> Entry:
        return ExactEntry(*args, **options)

    def log(self, name: str, *args: Any, **options: Any) -> None:
        """Record one value; see `Metrics.log`."""
        super().log(name, *args, **options)
        entry, micro = self._entries.get(name), self._cursor.micro
        if self.training and isinstance(entry, ExactEntry) and entry.on_step and micro is not None:
            step = self._cursor.number - micro.number
            if step != entry.step:
                entry.step, entry.in_step = step, []
            entry.in_step.append((entry.last, entry.last_weight))

    def step_values(self, world: World, written: dict[str, float] | None = None) -> list[tuple[Entry, float]]:
        """Return the values of the latest step's micro-batches, reduced over all processes."""
        entries: list[Any] = self._list_latest()
        own = read_numbers([entry.in_step for entry in entries])
        pairs = []
        for entry, values in zip(entries, own, strict=True):
            mean = entry.reduction == "mean"
            pairs.append(([v * w if mean else v for v, w in values if w], [w for _, w in values if w]))
        return self._reduce_entries(entries, pairs, world, written=written)

    @staticmethod
    def _reduce_entries(
        entries: list[Any],
        pairs: list[tuple[Any, Any]],
        world: World,
        exchanged_apart: Iterable[Entry] = (),
        written: dict[str, float] | None = None,
    ) -> list[tuple[Entry, float]]:
        Metrics._check_names(entries, world, exchanged_apart, written)
        results: list[tuple[Entry, float]] = []
        for entry, *parts in zip(entries, *world.gather_objects(pairs), strict=True):
            values = [value for part, _ in parts for value in part]
            if values:
                results.append((entry, entry.combine(values, [weight for _, part in parts for weight in part])))
        return results
