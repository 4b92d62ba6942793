"""One logged name: what has come in, and what it sums up to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

SHOWN = ("on_step", "on_epoch", "reduction", "prog_bar", "logger")
"""What says how an entry is shown, by attribute."""

Place = tuple[int, int]
"""A batch of an evaluation: the loader's index, and the batch's index in it."""

FOLD = 64  # 0-d tensors kept before they are summed: stacking them at once costs less than adding each


class Entry:
    """One logged name: how it is reduced, and what has come in so far.

    Attributes:
        suffix: the end of ``name`` that names the evaluation loader, if there are several.
        batches: value and weight by ``Metrics.place``, for an entry that logs the single batches of an evaluation;
            else None.
    """

    __slots__ = (
        "batches",
        "last",
        "last_weight",
        "logger",
        "metric",
        "name",
        "on_epoch",
        "on_step",
        "prog_bar",
        "reduction",
        "spec",
        "suffix",
        "total",
        "total_weight",
        "values",
        "weights",
    )

    def __init__(
        self,
        name: str,
        spec: tuple[Any, ...] | None,
        *,
        on_step: bool,
        on_epoch: bool,
        reduction: str,
        prog_bar: bool,
        logger: bool,
        suffix: str = "",
    ) -> None:
        self.name = name
        self.suffix = suffix
        self.spec = spec
        self.on_step = on_step
        self.on_epoch = on_epoch
        self.reduction = reduction
        self.prog_bar = prog_bar
        self.logger = logger
        self.metric: Any = None
        self.batches: BatchValues | None = None
        self.last: Any = None
        self.last_weight: float = 0.0
        self.values: list[Any] = []
        self.weights: list[float] = []
        self.total: Any = None
        self.total_weight = 0.0

    def fold(self) -> None:
        """Sum up what was appended."""
        kept = [(v, w) for v, w in zip(self.values, self.weights, strict=True) if w]
        self.values.clear()
        self.weights.clear()
        if not kept:
            return
        values = stack([value for value, _ in kept])
        weights = torch.tensor([w for _, w in kept], dtype=values.dtype, device=values.device)
        if self.reduction == "mean":
            folded = (values * weights).sum()
        else:
            folded = FOLDS[self.reduction](values)
        self.total = folded if self.total is None else COMBINE[self.reduction](self.total.to(folded.device), folded)
        self.total_weight += sum(w for _, w in kept)

    def replace_metric(self, metric: Any) -> None:
        """Take another metric object of the same name.

        Raises:
            ValueError: if an epoch's value is wanted, in which the counts of the first would be missing.
        """
        if self.on_epoch:
            raise ValueError(
                f"{self.name!r} was logged as two {type(metric).__name__} objects in one epoch, so its value would be "
                "that of the last one alone. Log one object, kept as an attribute of the task, or give them two names."
            )
        self.metric = metric

    def part(self) -> tuple[float | None, float, list[float], list[float]]:
        """What has come in, as plain numbers: what is summed up, and what is not yet."""
        total = None if self.total is None else float(self.total)
        return total, self.total_weight, [float(value) for value in self.values], list(self.weights)

    def latest(self) -> tuple[float, float]:
        """The latest step's value and what it weighs, as plain numbers."""
        return (0.0, 0.0) if self.last is None else (float(self.last), float(self.last_weight))

    def take_latest(self, parts: Iterable[tuple[float, float]]) -> None:
        """Go on from one `latest`, or from those of several processes."""
        known = [(value, weight) for value, weight in parts if weight]
        self.last, self.last_weight = 0.0, float(sum(weight for _, weight in known))
        if len(known) == 1:
            self.last = known[0][0]
        elif known and self.reduction == "mean":
            self.last = sum(value * weight for value, weight in known) / self.last_weight
        elif known:
            self.last = FOLDS[self.reduction](stack([value for value, _ in known])).item()

    def take(self, parts: Iterable[Any]) -> None:
        """Go on from one `part`, or from those of several processes."""
        for total, weight, values, weights in parts:
            if total is not None:
                one = stack([total])[0]
                self.total = one if self.total is None else COMBINE[self.reduction](self.total, one)
                self.total_weight += weight
            self.values += values
            self.weights += weights

    def epoch_pair(self) -> tuple[Any, float]:
        """(total, weight) of the epoch so far."""
        self.fold()
        return (0.0, 0.0) if self.total is None else (self.total, self.total_weight)

    def step_pair(self) -> tuple[Any, float]:
        """(value, weight) of the latest step, in the form of `epoch_pair`."""
        if self.last is None or not self.last_weight:
            return 0.0, 0.0
        if self.reduction != "mean":
            return self.last, self.last_weight
        # In float64, where weighing a float32 and dividing it again gives the same number.
        return stack([self.last])[0] * self.last_weight, self.last_weight

    def label(self, form: str) -> str:
        """The name under which the ``"step"`` or ``"epoch"`` value is shown."""
        if not (self.on_step and self.on_epoch):
            return self.name
        return f"{self.name.removesuffix(self.suffix)}_{form}{self.suffix}"

    def reduced(self, known: list[tuple[float, float]]) -> float:
        """Reduce the (value, weight) pairs of several processes; a mean's values are weighted sums."""
        if self.reduction == "mean":
            return sum(value for value, _ in known) / sum(weight for _, weight in known)
        # In torch: Python's min and max drop a NaN or keep it, depending on its place.
        return FOLDS[self.reduction](torch.tensor([value for value, _ in known], dtype=torch.float64)).item()


class BatchValues:
    """Values of single batches, by place; on the device until they are read."""

    def __init__(self) -> None:
        self._latest: dict[Place, tuple[Any, float]] = {}
        self._folded: list[tuple[list[Place], Tensor, list[float]]] = []

    def add(self, place: Place, value: Any, weight: float) -> None:
        """Keep a batch's value; a second one of the same batch replaces it."""
        self._latest[place] = value, weight
        if len(self._latest) > FOLD:  # 0-d tensors take 512 bytes each on a GPU
            newest = self._latest.popitem()
            self._fold()
            self._latest[newest[0]] = newest[1]

    def _fold(self) -> None:
        values = stack([value for value, _ in self._latest.values()])
        self._folded.append((list(self._latest), values, [weight for _, weight in self._latest.values()]))
        self._latest.clear()

    def read(self) -> list[tuple[Place, float, float]]:
        """Return (place, value, weight) of each batch, as plain numbers."""
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


def stack(values: list[Any]) -> Tensor:
    """0-d tensors and numbers as one vector of float64 (float32 on MPS, which has no other)."""
    device = next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if not any(isinstance(v, Tensor) for v in values):
        return torch.tensor(values, dtype=dtype)
    return torch.stack(
        [
            v.detach().reshape(()).to(device=device, dtype=dtype)
            if isinstance(v, Tensor)
            else torch.tensor(v, dtype=dtype, device=device)
            for v in values
        ]
    )
