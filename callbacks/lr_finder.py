"""`LearningRateFinder`: which learning rate to start from, by a short run whose rate rises step by step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ..common.messages import announce, warn
from ..common.optional import require
from ..common.validation import check_bool, check_int, check_number, choose
from .callback import Callback

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..trainer import TaskModule, Trainer

MODES = ("exponential", "linear")
_FORGET = 0.98  # how much of the running mean of the losses stays at each step


class _LRFinder:
    """What a search for a learning rate found.

    Args:
        mode: How the rate rises: ``"exponential"`` or ``"linear"``.
        lr_min: The first rate.
        lr_max: The last one.
        num_training: How many.

    Attributes:
        results: ``"lr"``, the rates that were tried, and ``"loss"``, the smoothed loss at each: the running mean
            ``m[k] = 0.98 * m[k-1] + 0.02 * loss[k]`` divided by ``1 - 0.98 ** (k + 1)``, so that the first is the loss
            itself. A loss is that of the whole step, over all micro-batches and processes, before the step is taken.
            One that is not finite is NaN here, and is in no mean.
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        self.mode = mode
        self.lr_min = lr_min
        self.lr_max = lr_max
        self.num_training = num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        self._mean = 0.0
        self._loss_count = 0
        self._best = math.inf
        self._optimal_idx: int | None = None

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0: evenly spaced from the first to the last one, or their logs."""
        share = step / max(1, self.num_training - 1)
        if self.mode == "linear":
            return self.lr_min + share * (self.lr_max - self.lr_min)
        return self.lr_min * (self.lr_max / self.lr_min) ** share

    def add(self, lr: float, loss: float) -> None:
        """Take note of a step."""
        smoothed = math.nan
        if math.isfinite(loss):
            self._loss_count += 1
            self._mean = _FORGET * self._mean + (1 - _FORGET) * loss
            smoothed = self._mean / (1 - _FORGET**self._loss_count)
            self._best = min(self._best, smoothed)
        self.results["lr"].append(lr)
        self.results["loss"].append(smoothed)

    def diverges(self, threshold: float) -> bool:
        """Whether the last loss is not finite, or ``threshold`` times the best so far (for a negative one: as far)."""
        last = self.results["loss"][-1]
        return not math.isfinite(last) or last > self._best + (threshold - 1) * abs(self._best)

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """The rate at which the smoothed loss falls most steeply; None, and a warning, if it falls nowhere.

        Steep is seen along the axis on which the rates are evenly spaced, the log of the rate or the rate itself:
        the smallest of ``numpy.gradient(loss, x)`` where ``x`` is ``log(lr)`` (mode ``"exponential"``) or ``lr``
        (``"linear"``), over the points that are left after the skipped ones and those that are NaN are taken out.

        Args:
            skip_begin: Points to leave out at the beginning.
            skip_end: Points to leave out at the end.
        """
        check_int("skip_begin", skip_begin, 0)
        check_int("skip_end", skip_end, 0)
        lrs, losses = self.results["lr"], self.results["loss"]
        indices = [k for k in range(skip_begin, len(lrs) - skip_end) if math.isfinite(losses[k])]
        self._optimal_idx = None
        if len(indices) < 2:
            warn(
                f"no learning rate can be suggested: of {len(lrs)} points {len(indices)} are left without the first "
                f"{skip_begin} and the last {skip_end}, and 2 are needed. Try more rates, or start from a lower one."
            )
            return None
        positions = [math.log(lrs[k]) if self.mode == "exponential" else lrs[k] for k in indices]
        values = torch.tensor([losses[k] for k in indices], dtype=torch.float64, device="cpu")
        slopes = torch.gradient(values, spacing=(torch.tensor(positions, dtype=torch.float64, device="cpu"),))[0]
        steepest = int(slopes.argmin())
        if not slopes[steepest] < 0:
            warn(
                f"no learning rate can be suggested: the loss falls at none from {lrs[indices[0]]:.3g} to "
                f"{lrs[indices[-1]]:.3g}. Try others (min_lr, max_lr), or see whether the model trains at all."
            )
            return None
        self._optimal_idx = indices[steepest]
        return lrs[self._optimal_idx]

    def plot(self, suggest: bool = False, show: bool = False, ax: Axes | None = None) -> Any:
        """Draw the loss over the rate with matplotlib; returns the figure.

        Args:
            suggest: Mark the suggestion.
            show: Open a window.
            ax: Where to draw. Default: a new figure.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
        """
        require("plot()", "matplotlib", extra="plot")
        import matplotlib.pyplot as plt

        if ax is None:
            _, ax = plt.subplots()
        lrs, losses = self.results["lr"], self.results["loss"]
        ax.plot(lrs, losses)
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        if suggest and self.suggestion() is not None:
            assert self._optimal_idx is not None
            ax.plot(lrs[self._optimal_idx], losses[self._optimal_idx], markersize=10, marker="o", color="red")
        if show:
            plt.show()
        return ax.figure


class LearningRateFinder(Callback):
    """Finds a learning rate to start from before the first step of ``fit``, and sets it.

    A copy of the task takes ``num_training_steps`` optimizer steps while the rate rises; then the copy is dropped, and
    what the run draws from is put back, so that of the search only its result is left. Then ``configure_optimizers``
    is called with the attribute set, so optimizers and schedulers begin from it. Of several groups of parameters each
    rises in proportion, the one with the highest rate being the one that is meant. Needs automatic optimization.

    A run that goes on from a checkpoint has found its rate before, and does not search again.

    Args:
        min_lr: The first rate to try.
        max_lr: The last one.
        num_training_steps: How many to try; if an epoch is shorter, the next one follows.
        mode: ``"exponential"``, or ``"linear"``: how the rate rises.
        early_stop_threshold: End the search when the smoothed loss is so many times the best one, or is not finite;
            None for never.
        update_attr: Set the task's attribute to the suggestion.
        attr_name: Its name. Default: ``lr`` or ``learning_rate``, of the task, its hparams or the data module.

    Attributes:
        optimal_lr: What was found: see its ``results``, ``suggestion()`` and ``plot()``.
    """

    searches = True
    exchanges = True

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        self.mode = choose("mode", mode.lower() if isinstance(mode, str) else mode, MODES)
        self.min_lr, self.max_lr = (
            float(check_number("min_lr", min_lr, 0.0)),
            float(check_number("max_lr", max_lr, 0.0)),
        )
        if not self.min_lr < self.max_lr < math.inf or (self.mode == "exponential" and not self.min_lr):
            raise ValueError(
                f"min_lr={min_lr!r}, max_lr={max_lr!r}: the rate rises from one to the other, so the first must be the "
                "smaller one, and more than 0 where the rise is exponential."
            )
        self.num_training_steps = check_int("num_training_steps", num_training_steps, 2)
        if early_stop_threshold is not None and not check_number("early_stop_threshold", early_stop_threshold) > 1:
            raise ValueError(f"early_stop_threshold={early_stop_threshold!r} must be more than 1, or None for no end.")
        self.early_stop_threshold = early_stop_threshold
        self.update_attr = check_bool("update_attr", update_attr)
        self.attr_name = attr_name
        self.optimal_lr: _LRFinder | None = None

    def lr_find(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Refused: a search within a run would have to begin the optimizer and its schedulers anew.

        Raises:
            RuntimeError: Always, with what to do instead.
        """
        raise RuntimeError(
            f"{type(self).__name__}.lr_find: the search runs by itself before the first step of fit, not within a run. "
            "To search again, end this fit, call treadle.tuner.Tuner(trainer).lr_find(task), and go on with another."
        )

    def state_dict(self) -> dict[str, Any]:
        """What was found, if the search has run."""
        finder = self.optimal_lr
        if finder is None:
            return {}
        settings = {"mode": finder.mode, "lr_min": finder.lr_min, "lr_max": finder.lr_max}
        return {**settings, "num_training": finder.num_training, "results": finder.results}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        state = dict(state_dict)
        results = state.pop("results")
        self.optimal_lr = _LRFinder(**state)
        self.optimal_lr.results = results

    def say(self, rate: float | None, name: str | None) -> None:
        """Tell the user what came of it.

        Args:
            rate: The suggestion.
            name: Of the attribute that was set.
        """
        assert self.optimal_lr is not None
        tried = len(self.optimal_lr.results["lr"])
        early = "" if tried == self.num_training_steps else f" (of {self.num_training_steps}: the loss diverges)"
        done = f" {name} is set to it." if name and rate is not None else ""
        announce(
            f"LearningRateFinder: tried {tried} learning rates{early}; it suggests {rate and f'{rate:.4g}'}.{done}"
        )
