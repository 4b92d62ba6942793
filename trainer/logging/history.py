"""What a run logged and what it spent its time on, kept for a look at it while it runs or afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ...common.messages import nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ...engine.data import Cursor
    from ..loop import Progress

MOST_POINTS = 4096


class Curve:
    """A number over the optimizer steps.

    A curve that has `MOST_POINTS` points loses every second one, and of those to come only so many are kept too: a
    long run's curve is coarser, not longer, so that memory and checkpoints stay small. The loggers get every value.

    Attributes:
        steps: Optimizer steps that were taken, of each point.
        values: The number at each of them.
        last: The newest step and value, whether it is among the points or not; None before the first.
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
        """The number after ``step`` optimizer steps; a newer one takes the place of one of the same step."""
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
        """The points with the newest one, to draw."""
        if self.last is None or self.steps[-1] == self.last[0]:
            return list(self.steps), list(self.values)
        return [*self.steps, self.last[0]], [*self.values, self.last[1]]

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {
            "steps": torch.tensor(self.steps, dtype=torch.int64, device="cpu"),
            "values": torch.tensor(self.values, dtype=torch.float64, device="cpu"),
            "last": self.last,
            "every": self._every,
            "passed": self._passed,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.steps, self.values = state_dict["steps"].tolist(), state_dict["values"].tolist()
        self.last = state_dict["last"] and tuple(state_dict["last"])
        self._every, self._passed = state_dict["every"], state_dict["passed"]


class History(Mapping[str, Curve]):
    """The curves of a run by name: ``trainer.history["train_loss"].values``.

    There is a curve of everything that was logged with ``logger=True``, also where no logger is, but of no single batch
    of an evaluation. A run that is resumed goes on with the curves and rates of its checkpoint; times and throughput
    are those of this process.

    Args:
        cursor: Knows how many seconds this process has waited for batches so far.

    Attributes:
        rates: Each optimizer's learning rate, every ``log_every_n_steps``: the one the next step is taken with. Named
            as `LearningRateMonitor` names them.
        throughput: Samples per second of training, validation and checkpoints left out; of all processes.
        spent: Seconds by what they were spent on: ``"setup"``, ``"training"``, ``"validation"``, ``"checkpoints"``,
            ``"test"``, ``"predict"``.
        waits: How many of those this process waited for batches. An accelerator may still have been busy meanwhile.
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
        self._measured: tuple[int, float] | None = None  # samples and seconds of training when the last ones were

    # -- curves --------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Curve:
        try:
            return self.curves[name]
        except KeyError:
            logged_names = ", ".join(self.curves) or "nothing"
            raise KeyError(f"{name!r} was not logged; {logged_names} was.{nearest(name, self.curves)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self.curves

    def __iter__(self) -> Iterator[str]:
        return iter(self.curves)

    def __len__(self) -> int:
        return len(self.curves)

    def __repr__(self) -> str:
        return f"History({', '.join(self.curves)})"

    def add(self, row: Mapping[str, float], step: int) -> None:
        """Note what is logged after ``step`` optimizer steps."""
        _add(self.curves, row, step)

    def begin(self, progress: Progress, rates: Mapping[str, float]) -> None:
        """Training begins: note what `measure` counts from, and the first learning rates."""
        self.tick()
        self._measured = (progress.samples, self.spent.get("training", 0.0))
        if not self.rates:
            _add(self.rates, rates, progress.step)

    def measure(self, progress: Progress, rates: Mapping[str, float]) -> None:
        """Note the learning rates and the throughput."""
        _add(self.rates, rates, progress.step)
        self.tick()
        before, self._measured = self._measured, (progress.samples, self.spent.get("training", 0.0))
        if before is not None and (seconds := self._measured[1] - before[1]) > 0:
            self.throughput.add(progress.step, (progress.samples - before[0]) / seconds)

    # -- time ----------------------------------------------------------------------------------------------------

    @contextmanager
    def spending(self, part: str) -> Iterator[None]:
        """Inside, time is spent on ``part``, and not on what it is a part of."""
        outer = self._part
        self._switch(part)
        try:
            yield
        finally:
            self._switch(outer)

    def tick(self) -> None:
        """Bring ``spent`` and ``waits`` up to now."""
        self._switch(self._part)

    def _switch(self, part: str | None) -> None:
        current_time, waited = time.perf_counter(), self._cursor.waited
        if self._part is not None:
            self.spent[self._part] = self.spent.get(self._part, 0.0) + current_time - self._since
            self.waits[self._part] = self.waits.get(self._part, 0.0) + waited - self._waited_since
        self._part, self._since, self._waited_since = part, current_time, waited

    # -- keeping and showing -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The curves and rates. No times: what is the same twice is saved as the same bytes."""
        return {
            "curves": {name: curve.state_dict() for name, curve in self.curves.items()},
            "rates": {name: curve.state_dict() for name, curve in self.rates.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        for name in ("curves", "rates"):
            setattr(self, name, {key: _load_curve(state) for key, state in state_dict[name].items()})

    def plot(self, *names: str, show: bool = False) -> Figure:
        """Draw curves with matplotlib; returns the figure, with one plot for names that end alike (``..._loss``).

        A notebook displays the figure as the cell's value, once: there pyplot, which would display it too, forgets it.

        Args:
            names: Which; all, by default, with the learning rates.
            show: Open a window.

        Raises:
            KeyError: For what was not logged.
            ModuleNotFoundError: If matplotlib is not installed.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ModuleNotFoundError("plot() needs matplotlib: pip install matplotlib") from error
        from ...callbacks.reporting import group_names

        chosen = {name: self[name] for name in names} if names else {**self.curves, **self.rates}
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
