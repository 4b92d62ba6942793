"""Logged values, and the time spent in each activity."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ...common.messages import nearest
from ...common.optional import require
from ...engine.data import Cursor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..loop import Progress

MOST_POINTS = 4096


class Curve:
    """Values of one metric over the optimizer steps. A long curve drops points to limit its memory.

    Attributes:
        steps: Optimizer steps of the points.
        values: Values of the points.
        last: The latest step and value, whether recorded as a point or not; None before the first.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self.last: tuple[int, float] | None = None
        self._every = 1
        self._passed = 0

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        return f"Curve({len(self)} points, last {self.last})"

    def add(self, step: int, value: float) -> None:
        """Add a value, which replaces the latest one if both have the same step."""
        if self.last is not None and self.last[0] == step:
            if self.steps[-1] == step:
                self.values[-1] = value
            self.last = (step, value)
            return
        self.last = (step, value)
        if self._passed % self._every == 0:
            self.steps.append(step)
            self.values.append(value)
            if len(self.steps) >= MOST_POINTS:
                del self.steps[1::2], self.values[1::2]
                self._every *= 2
        self._passed += 1

    def points(self) -> tuple[list[int], list[float]]:
        """Return the steps and values of the points, for a plot. The latest value is always included."""
        if self.last is None or self.steps[-1] == self.last[0]:
            return list(self.steps), list(self.values)
        return [*self.steps, self.last[0]], [*self.values, self.last[1]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the curve, with its points as tensors."""
        return {
            "steps": torch.tensor(self.steps, dtype=torch.int64, device="cpu"),
            "values": torch.tensor(self.values, dtype=torch.float64, device="cpu"),
            "last": self.last,
            "every": self._every,
            "passed": self._passed,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.steps, self.values = state_dict["steps"].tolist(), state_dict["values"].tolist()
        self.last = state_dict["last"] and tuple(state_dict["last"])
        self._every, self._passed = state_dict["every"], state_dict["passed"]


class History(Mapping[str, Curve]):
    """Curves of a run by name: ``trainer.history["train_loss"].values``.

    Values of single evaluation batches have no curve. A resumed run continues the curves and rates of its checkpoint;
    times and throughput are those of this process.

    Args:
        cursor: The accelerator's cursor, which counts the seconds of waiting for batches.

    Attributes:
        rates: Learning rates, under the names of `LearningRateMonitor`.
        throughput: Training samples per second over all processes. Validations and checkpoints do not count.
        spent: Seconds by activity, such as ``"training"`` and ``"validation"``.
        waits: Seconds by activity in which the process waited for batches; ``spent`` includes them.
    """

    def __init__(self, cursor: Cursor) -> None:
        self.curves: dict[str, Curve] = {}
        self.rates: dict[str, Curve] = {}
        self.throughput = Curve()
        self.spent: dict[str, float] = {}
        self.waits: dict[str, float] = {}
        self._cursor = cursor
        self._part: str | None = None
        self._since = self._waited_since = 0.0
        self._measured: tuple[int, float] | None = None  # samples and seconds of training at the last measurement

    def __getstate__(self) -> dict[str, Any]:  # for copies of the Trainer, in any process
        return {**vars(self), "_cursor": Cursor(), "_part": None}

    def use(self, cursor: Cursor) -> None:
        """Read the seconds of waiting for batches from another cursor.

        Args:
            cursor: Cursor of the Accelerator.
        """
        self._cursor = cursor

    # -- curves --------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Curve:
        try:
            return self.curves[name]
        except KeyError:
            logged_names = ", ".join(self.curves) or "nothing"
            raise KeyError(f"{name!r} was not logged. Logged: {logged_names}.{nearest(name, self.curves)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self.curves

    def __iter__(self) -> Iterator[str]:
        return iter(self.curves)

    def __len__(self) -> int:
        return len(self.curves)

    def __repr__(self) -> str:
        return f"History({', '.join(self.curves)})"

    def add(self, row: Mapping[str, float], step: int) -> None:
        """Add each logged value to the curve with its name.

        Args:
            row: Values by name.
            step: Number of optimizer steps.
        """
        _add(self.curves, row, step)

    def begin(self, progress: Progress, rates: Mapping[str, float]) -> None:
        """Record the start of training, and the learning rates if none are recorded yet.

        Args:
            progress: Counters of the run.
            rates: Learning rates by name.
        """
        self.tick()
        self._measured = (progress.samples, self.spent.get("training", 0.0))
        if not self.rates:
            _add(self.rates, rates, progress.step)

    def measure(self, progress: Progress, rates: Mapping[str, float]) -> None:
        """Record the learning rates, and the throughput since the last measurement.

        Args:
            progress: Counters of the run.
            rates: Learning rates by name.
        """
        _add(self.rates, rates, progress.step)
        self.tick()
        previous, self._measured = self._measured, (progress.samples, self.spent.get("training", 0.0))
        if previous is not None and (seconds := self._measured[1] - previous[1]) > 0:
            self.throughput.add(progress.step, (progress.samples - previous[0]) / seconds)

    # -- time ----------------------------------------------------------------------------------------------------

    @contextmanager
    def spending(self, part: str) -> Iterator[None]:
        """Count the time within a context as spent on ``part`` instead of the enclosing activity.

        Args:
            part: Name of the activity.
        """
        outer = self._part
        self._switch(part)
        try:
            yield
        finally:
            self._switch(outer)

    def tick(self) -> None:
        """Add the time since the last update to ``spent`` and ``waits``."""
        self._switch(self._part)

    def _switch(self, part: str | None) -> None:
        current_time, waited = time.perf_counter(), self._cursor.waited
        if self._part is not None:
            self.spent[self._part] = self.spent.get(self._part, 0.0) + current_time - self._since
            self.waits[self._part] = self.waits.get(self._part, 0.0) + waited - self._waited_since
        self._part, self._since, self._waited_since = part, current_time, waited

    # -- storage and display -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the curves and rates, without times, because a repeated run has to save the same bytes."""
        return {
            "curves": {name: curve.state_dict() for name, curve in self.curves.items()},
            "rates": {name: curve.state_dict() for name, curve in self.rates.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Args:
            state_dict: Result of `state_dict`.
        """
        for name in ("curves", "rates"):
            setattr(self, name, {key: _load_curve(state) for key, state in state_dict[name].items()})

    def plot(self, *names: str, show: bool = False) -> Figure:
        """Draw curves with matplotlib and return the figure, with one plot for each quantity.

        Args:
            names: Names of curves, including those of learning rates, such as ``"lr-SGD"``. Default: all.
            show: Show the figure in a window. Default: False.

        Raises:
            KeyError: If a name was not logged.
            ModuleNotFoundError: If matplotlib is not installed.
        """
        require("plot()", "matplotlib", extra="plot")
        import matplotlib.pyplot as plt

        from ...callbacks.reporting import group_names

        curves = {**self.curves, **self.rates}
        chosen = {name: curves[name] if name in curves else self[name] for name in names} if names else curves
        groups = group_names(chosen)
        figure, places = plt.subplots(
            max(1, len(groups)), squeeze=False, sharex=True, figsize=(8, 1 + 2.5 * max(1, len(groups)))
        )
        for (title, members), place in zip(groups.items(), places[:, 0], strict=False):
            for name in members:
                steps, values = chosen[name].points()
                place.plot(steps, values, label=name, marker="o" if len(steps) < 20 else None, markersize=3)
            place.set_ylabel(title)
            place.legend()
        places[-1, 0].set_xlabel("Optimizer step")
        figure.tight_layout()
        if show:
            plt.show()
        if "inline" in plt.get_backend():
            plt.close(figure)
        return figure


def _add(curves: dict[str, Curve], row: Mapping[str, float], step: int) -> None:
    for name, value in row.items():
        curve = curves.get(name)
        if curve is None:
            curve = curves[name] = Curve()
        curve.add(step, value)


def _load_curve(state: Mapping[str, Any]) -> Curve:
    curve = Curve()
    curve.load_state_dict(state)
    return curve
