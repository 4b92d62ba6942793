"""Learning rate search by a range test."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...callbacks import LearningRateFinder, _LRFinder
from ...common.messages import warn
from ..loop import configure
from .sandbox import Trial, attribute_owners, check_attribute, rehearsal, set_attribute, train

if TYPE_CHECKING:
    from ..core import TaskModule
    from ..trainer import Trainer


class LRSearch:
    """Learning rate search that takes steps with rising rates, until all rates are tried or the loss diverges."""

    def __init__(self, trainer: Trainer, finder: LearningRateFinder) -> None:
        self.trainer = trainer
        self.finder = finder

    def run(self) -> None:
        """Find a learning rate and set it.

        Raises:
            ValueError: If the settings do not fit the task, or a copy of the task cannot be trained.
        """
        trainer, finder = self.trainer, self.finder
        name, task = self._choose_attribute_name(), trainer.task
        assert task is not None
        if not task.automatic_optimization:
            raise ValueError(
                f"LearningRateFinder cannot search with automatic_optimization=False. {type(task).__name__} steps its "
                "optimizers itself, so the losses can't be matched to learning rates. Remove the finder."
            )
        curve = _LRFinder(finder.mode, finder.min_lr, finder.max_lr, finder.num_training_steps)
        with rehearsal(trainer) as inner:
            train(inner, _RangeTest(curve, finder.early_stop_threshold))
            finder.optimal_lr = curve
            if name is not None:
                _check_rate_is_used(inner, name, finder.max_lr)
        self.apply()

    def apply(self) -> None:
        """Set the learning rate that the search found or that was restored from a checkpoint."""
        assert self.finder.optimal_lr is not None
        rate, name = self.finder.optimal_lr.suggestion(), self._choose_attribute_name()
        if rate is not None and name is not None:
            set_attribute(self.trainer, name, rate)
        self.finder.announce_result(rate, name)

    def _choose_attribute_name(self) -> str | None:
        """Return the name of the attribute to set; None if ``update_attr`` is False."""
        trainer, finder = self.trainer, self.finder
        if finder.attr_name:
            check_attribute(trainer, finder, finder.attr_name, "attr_name")
        if not finder.update_attr:
            return None
        usual = (name for name in ("lr", "learning_rate") if attribute_owners(trainer, name))
        name = finder.attr_name or next(usual, None)
        if name is None:
            raise ValueError(
                f"{type(trainer.task).__name__} has neither lr nor learning_rate, which LearningRateFinder sets. Set "
                "self.lr in __init__ and use it in configure_optimizers, or pass attr_name=... or update_attr=False."
            )
        return name


def _check_rate_is_used(inner: Trainer, name: str, rate: float) -> None:
    """Warn if ``configure_optimizers`` sets the same learning rates for two values of the attribute."""
    assert inner.task is not None
    rates = []
    for value in (rate, 2 * rate):
        set_attribute(inner, name, value)
        optimizers, _ = configure(inner.task)
        rates.append([_get_base_rate(group) for group in optimizers[0].param_groups])
    if rates[0] == rates[1]:
        warn(
            f"{type(inner.task).__name__}.configure_optimizers does not use {name}, which LearningRateFinder sets, so "
            f"the result of the search has no effect. Create the optimizer with lr=self.{name}."
        )


class _RangeTest(Trial):
    """Steps with rising rates, and their losses. The ratios between the rates of the parameter groups stay the same.

    The loss of a step is the mean over its micro-batches and all processes, weighted like the gradient.
    """

    def __init__(self, curve: _LRFinder, threshold: float | None) -> None:
        super().__init__(curve.num_training)
        self._curve, self._threshold = curve, threshold
        self._shares: list[float] = []  # rate of each group relative to the largest
        self._micros: list[Any] = []
        self._sum: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._micros.clear()

    def on_train_batch_start(self, trainer: Trainer, pl_module: TaskModule, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self._micros.append(trainer.accelerator.cursor.micro)
        self._set_rates(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the loss of a micro-batch, weighted by the weight that the step returned, or else by its samples."""
        micro = self._micros.pop(0)
        # Otherwise it is a placeholder batch, or training_step returned None.
        if micro.samples and "loss" in outputs:
            weight = outputs.get("weight")
            weight = micro.samples if weight is None else weight
            self._sum = self._sum + outputs["loss"].float() * weight
            self._weight = self._weight + weight

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        loss = self._take_loss(trainer)
        self._curve.add(self._curve.rate(self.done), math.nan if loss is None else loss)
        if loss is not None and self._threshold is not None and self._curve.diverges(self._threshold):
            self.end()
        super().on_step_end(trainer, pl_module)

    def _set_rates(self, trainer: Trainer) -> None:
        if not trainer.optimizers:
            raise ValueError(
                f"{type(trainer.task).__name__}.configure_optimizers returned no optimizer, but LearningRateFinder "
                "needs an optimizer. Return an optimizer, or remove the finder."
            )
        groups = trainer.optimizers[0].param_groups
        if not self._shares:
            base = [_get_base_rate(group) for group in groups]
            self._shares = [group_rate / max(base) if max(base) > 0 else 1.0 for group_rate in base]
        for group, share in zip(groups, self._shares, strict=True):
            rate = self._curve.rate(self.done) * share
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _take_loss(self, trainer: Trainer) -> float | None:
        """Return the mean loss since the last call; None if no process had a loss. Call it on all processes."""
        both = torch.tensor([float(self._sum), float(self._weight)], dtype=torch.float64, device="cpu")
        device = trainer.accelerator.device
        both = both.to(device, torch.float32 if device.type == "mps" else torch.float64)
        total, weight = trainer.accelerator.data_world.all_reduce(both).tolist()
        self._sum = self._weight = 0.0
        return total / weight if weight else None


def _get_base_rate(group: dict[str, Any]) -> float:
    """Return a parameter group's learning rate before a scheduler changed it. A warmup scheduler may start at 0."""
    return float(group.get("initial_lr", group["lr"]))
