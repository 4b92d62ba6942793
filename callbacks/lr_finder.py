"""`LearningRateFinder`: searches for an initial learning rate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..common.messages import announce, warn
from ..common.optional import require
from ..common.validation import check_bool, check_int, check_number, choose
from .callback import Callback

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..trainer import TaskModule, Trainer

MODES = ("exponential", "linear")
_FORGET = 0.98  # fraction of the running mean of the losses that is kept in each step
_SIGNIFICANT = 3.0  # standard deviations; with 100 losses of pure noise, 4 % of the searches exceed them


class _LRFinder:
    """Result of a search for a learning rate.

    Args:
        mode: Spacing of the learning rates: ``"exponential"`` or ``"linear"``.
        lr_min: The first learning rate.
        lr_max: The last learning rate.
        num_training: Number of learning rates.

    Attributes:
        results: The learning rates that were tried, under ``"lr"``, and the smoothed loss at each, under ``"loss"``.
            The smoothed loss is a bias-corrected exponential moving average with decay 0.98. A loss that is not finite
            becomes NaN and is excluded from the average.

    Examples:
        >>> from treadle.callbacks import _LRFinder
        >>> finder = _LRFinder("exponential", lr_min=0.001, lr_max=1.0, num_training=4)
        >>> for step, loss in enumerate([2.0, 1.9, 1.0, 0.9]):
        ...     finder.add(finder.rate(step), loss)
        >>> round(finder.suggestion(skip_begin=0, skip_end=0), 3)
        0.1
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        self.mode = mode
        self.lr_min = lr_min
        self.lr_max = lr_max
        self.num_training = num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        self._losses: list[float] = []  # not smoothed
        self._mean = 0.0
        self._loss_count = 0
        self._best = math.inf
        self._optimal_idx: int | None = None

    def rate(self, step: int) -> float:
        """Return the learning rate for a step.

        Args:
            step: Index of the step.
        """
        share = step / max(1, self.num_training - 1)
        if self.mode == "linear":
            return self.lr_min + share * (self.lr_max - self.lr_min)
        return self.lr_min * (self.lr_max / self.lr_min) ** share

    def add(self, lr: float, loss: float) -> None:
        """Record the learning rate and the loss of a step.

        Args:
            lr: Learning rate of the step.
            loss: Loss of the step, not smoothed.
        """
        smoothed = math.nan
        if math.isfinite(loss):
            self._loss_count += 1
            self._mean = _FORGET * self._mean + (1 - _FORGET) * loss
            smoothed = self._mean / (1 - _FORGET**self._loss_count)
            self._best = min(self._best, smoothed)
        self.results["lr"].append(lr)
        self.results["loss"].append(smoothed)
        self._losses.append(loss)

    def diverges(self, threshold: float) -> bool:
        """Return whether the last smoothed loss is not finite, or exceeds ``threshold`` times the best one.

        For a negative best loss, the permitted increase is that for a positive loss of the same magnitude.

        Args:
            threshold: Factor by which the last loss may exceed the best one.
        """
        last = self.results["loss"][-1]
        return not math.isfinite(last) or last > self._best + (threshold - 1) * abs(self._best)

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the rate at which the smoothed loss falls most steeply; None, with a warning, if no such rate exists.

        The slope is measured over ``log(lr)`` in mode ``"exponential"``, and over ``lr`` in mode ``"linear"``. Only
        rates at which the smoothed loss has fallen by more than the noise of the losses explains are considered.

        Args:
            skip_begin: Number of points to skip at the beginning. Default: 10.
            skip_end: Number of points to skip at the end. Default: 1.

        Raises:
            ValueError: If an argument is invalid.
        """
        check_int("skip_begin", skip_begin, 0)
        check_int("skip_end", skip_end, 0)
        lrs, losses = self.results["lr"], self.results["loss"]
        indices = [k for k in range(skip_begin, len(lrs) - skip_end) if math.isfinite(losses[k])]
        self._optimal_idx = None
        if len(indices) < 2:
            warn(
                f"no learning rate can be suggested: at least 2 points are needed, but skip_begin={skip_begin}, "
                f"skip_end={skip_end} and non-finite losses leave only {len(indices)} of {len(lrs)}. Raise "
                "num_training_steps, or lower min_lr."
            )
            return None
        positions = [math.log(lrs[k]) if self.mode == "exponential" else lrs[k] for k in indices]
        values = torch.tensor([losses[k] for k in indices], dtype=torch.float64, device="cpu")
        slopes = torch.gradient(values, spacing=(torch.tensor(positions, dtype=torch.float64, device="cpu"),))[0]
        slopes[~self._find_significant(indices)] = math.inf
        steepest = int(slopes.argmin())
        if slopes[steepest] == math.inf:
            warn(
                f"no learning rate can be suggested: from {lrs[indices[0]]:.3g} to {lrs[indices[-1]]:.3g}, the "
                "smoothed loss falls no further than the noise of the single losses explains. Raise "
                "num_training_steps, max_lr or the batch size, or check whether the model trains at all."
            )
            return None
        if not slopes[steepest] < 0:
            warn(
                f"no learning rate can be suggested: the loss does not fall at any rate from {lrs[indices[0]]:.3g} to "
                f"{lrs[indices[-1]]:.3g}. Change min_lr and max_lr, or check whether the model trains at all."
            )
            return None
        self._optimal_idx = indices[steepest]
        return lrs[self._optimal_idx]

    def _find_significant(self, indices: list[int]) -> Tensor:
        """Return a mask of the points, up to the lowest one, at which the smoothed loss has fallen significantly.

        A fall from an earlier point is significant if it exceeds three standard deviations of the difference between
        two independent averages. The deviation of a single loss comes from the differences of successive losses.
        """
        smoothed = torch.tensor([self.results["loss"][k] for k in indices], dtype=torch.float64, device="cpu")
        losses = torch.tensor([x for x in self._losses if math.isfinite(x)], dtype=torch.float64, device="cpu")
        if len(losses) < 4:
            return torch.ones(len(indices), dtype=torch.bool, device="cpu")  # there is nothing to estimate it from
        deviation = 1.4826 * losses.diff().abs().median().item() / math.sqrt(2)
        counts = torch.tensor(self._losses, device="cpu").isfinite().cumsum(0)[indices]  # losses in each average
        kept = _FORGET ** counts.double()
        variances = (1 - _FORGET) / (1 + _FORGET) * (1 + kept) / (1 - kept) * deviation**2
        mask = torch.zeros(len(indices), dtype=torch.bool, device="cpu")
        for k in range(1, int(smoothed.argmin()) + 1):
            mask[k] = bool((smoothed[:k] - smoothed[k] > _SIGNIFICANT * (variances[:k] + variances[k]).sqrt()).any())
        return mask

    def plot(self, suggest: bool = False, show: bool = False, ax: Axes | None = None) -> Any:
        """Plot the smoothed loss against the learning rate with matplotlib and return the figure.

        Args:
            suggest: Mark the learning rate that `suggestion` returns with its default arguments. Default: False.
            show: Also show the plot in a window. Default: False.
            ax: The axes to draw on. Default: those of a new figure.

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
    """Callback that searches for an initial learning rate before the first step of ``fit``, and sets it.

    A copy of the task takes up to ``num_training_steps`` optimizer steps while the rate rises. The RNG state is
    restored afterwards. The suggested rate is assigned to the attribute ``attr_name`` before ``configure_optimizers``
    runs. Create the optimizer with this attribute as its learning rate. If no rate can be suggested, for example
    because the loss does not fall by more than its noise, a warning is issued and the attribute does not change. With
    several parameter groups, the ratios between their rates stay the same. The suggested rate is that of the group with
    the highest rate. A run that is resumed from a checkpoint does not search again. As in Lightning, a subclass can
    override ``on_fit_start`` to omit this search, and call `lr_find` in ``on_train_epoch_start``.

    Args:
        min_lr: The first rate to try. Default: 1e-8.
        max_lr: The last rate to try. Default: 1.0.
        num_training_steps: Maximum number of rates to try. Default: 100.
        mode: Spacing of the rates to try: ``"exponential"`` or ``"linear"``. Default: ``"exponential"``.
        early_stop_threshold: End the search early if the smoothed loss is not finite or exceeds this multiple of the
            best one. None disables early stopping. Default: 4.0.
        update_attr: Assign the suggested rate to the attribute ``attr_name``. Default: True.
        attr_name: Name of the attribute for the suggested rate, in the task, the data module or the hparams of either.
            Default: an empty string, which selects ``lr`` if it exists, otherwise ``learning_rate``.

    Attributes:
        optimal_lr: Result of the search: an object with ``results``, ``suggestion()`` and ``plot()``. None before the
            search.

    Raises:
        ValueError, TypeError: If an argument is invalid. In ``fit``, if the search cannot run, for example with manual
            optimization.

    References:
        Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, https://arxiv.org/abs/1506.01186.

    Examples:
        >>> import treadle as tl
        >>> from treadle.callbacks import LearningRateFinder
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> finder = LearningRateFinder(num_training_steps=20, update_attr=False)
        >>> trainer = tl.Trainer(max_steps=1, accelerator="cpu", devices=1, barebones=True, callbacks=finder)
        >>> trainer.fit(BoringModel())
        >>> len(finder.optimal_lr.results["lr"]) > 0
        True
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
        self.min_lr = float(check_number("min_lr", min_lr, 0.0))
        self.max_lr = float(check_number("max_lr", max_lr, 0.0))
        if not self.min_lr < self.max_lr < math.inf or (self.mode == "exponential" and not self.min_lr):
            raise ValueError(
                f"min_lr={min_lr!r}, max_lr={max_lr!r}: min_lr must be smaller than max_lr and, with "
                "mode='exponential', above 0. max_lr must be finite."
            )
        self.num_training_steps = check_int("num_training_steps", num_training_steps, 1)
        if early_stop_threshold is not None and not check_number("early_stop_threshold", early_stop_threshold) > 1:
            raise ValueError(
                f"early_stop_threshold={early_stop_threshold!r} must be more than 1, or None to disable it."
            )
        self.early_stop_threshold = early_stop_threshold
        self.update_attr = check_bool("update_attr", update_attr)
        self.attr_name = attr_name
        self.optimal_lr: _LRFinder | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Search, if a subclass overrides this hook and calls it. Otherwise, the search precedes this hook."""
        if self.starts_search:
            self.lr_find(trainer, pl_module)

    @property
    def starts_search(self) -> bool:
        """True if a subclass overrides `on_fit_start`, so that the search does not precede the run."""
        return type(self).on_fit_start is not LearningRateFinder.on_fit_start

    def lr_find(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Search with the current weights, and also set the rate of the optimizers.

        Call it in ``on_train_epoch_start``. The run then continues as if the search had not taken place, but for the
        rate, which a scheduler may change. After an epoch's first batch, and so in an epoch that is resumed there, this
        does nothing.

        Args:
            trainer: The Trainer.
            pl_module: The task.

        Raises:
            ValueError: If the search cannot run, for example because the model is sharded.
        """
        trainer._search_again(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the result of the search, if any."""
        finder = self.optimal_lr
        if finder is None:
            return {}
        settings = {"mode": finder.mode, "lr_min": finder.lr_min, "lr_max": finder.lr_max}
        return {
            **settings,
            "num_training": finder.num_training,
            "results": finder.results,
            "losses": finder._losses,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        if not state_dict:  # saved before the search
            return
        state = dict(state_dict)
        results, losses = state.pop("results"), state.pop("losses")
        self.optimal_lr = _LRFinder(**state)
        self.optimal_lr.results, self.optimal_lr._losses = results, losses

    def announce_result(self, rate: float | None, name: str | None) -> None:
        """Announce the result of the search.

        Args:
            rate: The suggested rate, or None.
            name: Name of the attribute for the suggested rate; None if ``update_attr`` is False.
        """
        assert self.optimal_lr is not None
        tried = len(self.optimal_lr.results["lr"])
        total = self.num_training_steps
        rates = (
            f"{tried} learning rates" if tried == total else f"{tried} of {total} learning rates (the loss diverged)"
        )
        suggestion = "suggests none" if rate is None else f"suggests {rate:.4g}"
        done = f"; {name} is set to this rate" if name and rate is not None else ""
        announce(f"LearningRateFinder tried {rates} and {suggestion}{done}")
