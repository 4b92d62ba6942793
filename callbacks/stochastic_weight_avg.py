"""`StochasticWeightAveraging`: averages a model's weights over the final epochs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..common.messages import announce, format_count
from ..common.validation import check_int, check_number, check_positive, choose
from ._averaging import KEYS, Averaging, average_each, average_equally, measure

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer

_STRATEGIES: dict[str, Callable[[float], float]] = {
    "cos": lambda share: (1 - math.cos(math.pi * share)) / 2,
    "linear": lambda share: share,
}


class StochasticWeightAveraging(Averaging):
    """Callback that anneals the learning rates and averages the weights over the final epochs.

    Both begin in the epoch that ``swa_epoch_start`` specifies. The task's own learning rate schedulers stop at the
    start of that epoch. After training, the averages are put into the model. If the model has BatchNorm layers, their
    statistics are then recomputed in one more pass over the training data. Validations use the trained weights.

    A checkpoint that is saved during training contains the trained weights and the averages, if there are any. A
    resumed run restores the averages. `averaged_weights` returns them for other uses.

    Args:
        swa_lrs: The learning rate to anneal to, or a list with one rate for each parameter group. With several
            optimizers, the groups of the first one come first.
        swa_epoch_start: First epoch whose weights are averaged, counted from 1 (int) or given as a fraction of
            ``max_epochs`` (float). Default: 0.8.
        annealing_epochs: Number of epochs until ``swa_lrs`` is reached; 0 sets the rates immediately. Default: 10.
        annealing_strategy: Shape of the annealing: ``"cos"`` or ``"linear"``. Default: ``"cos"``.
        avg_fn: Function that returns the new average: ``avg_fn(averaged, current, num_averaged)``. Default: the mean
            over all averaged epochs.
        device: Device of the averages. If None or if the model is sharded, the device of the weights is used. Default:
            ``"cpu"``.

    Raises:
        ValueError, TypeError, RuntimeError: If an argument is invalid.
        ValueError: In ``fit``, if the task uses manual optimization or has no optimizer, or if another callback also
            averages weights.
        ValueError: In ``fit``, if the strategy does not support averaging, if ``swa_epoch_start`` is a fraction but
            ``max_epochs`` is unlimited, if the length of ``swa_lrs`` differs from the number of parameter groups, or if
            the averages in the checkpoint do not match the model.

    References:
        Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", 2018,
        https://arxiv.org/abs/1803.05407.

    Examples:
        >>> import treadle as tl
        >>> from treadle.callbacks import StochasticWeightAveraging
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
        >>> trainer = tl.Trainer(
        ...     max_epochs=2,
        ...     limit_train_batches=1,
        ...     accelerator="cpu",
        ...     devices=1,
        ...     barebones=True,
        ...     callbacks=averaging,
        ... )
        >>> trainer.fit(BoringModel())
        >>> averaging.n_averaged
        2
    """

    _key = KEYS[1]
    _position = ("latest_epoch", "initial")

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: str = "cos",
        avg_fn: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        device: torch.device | str | None = "cpu",
    ) -> None:
        super().__init__()
        for rate in swa_lrs if isinstance(swa_lrs, list) else [swa_lrs]:
            check_positive("swa_lrs", check_number("swa_lrs", rate))
        if isinstance(swa_epoch_start, float):
            if not 0 <= swa_epoch_start <= 1:
                raise ValueError(
                    f"swa_epoch_start={swa_epoch_start!r} must be an int of at least 1, or a float in [0, 1]."
                )
        else:
            check_int("swa_epoch_start", swa_epoch_start, 1)
        if avg_fn is not None and not callable(avg_fn):
            raise TypeError(f"avg_fn={avg_fn!r} must be a function.")
        self.swa_lrs = swa_lrs
        self.swa_epoch_start = swa_epoch_start
        self.annealing_epochs = check_int("annealing_epochs", annealing_epochs, 0)
        self.annealing_strategy = choose("annealing_strategy", annealing_strategy, _STRATEGIES)
        self.device = device
        self._average = average_equally if avg_fn is None else partial(average_each, avg_fn)
        self._start = 0
        self._initial: list[list[float]] | None = None  # each optimizer's rates at the start of the annealing

    @property
    def n_averaged(self) -> int:
        """Number of times that the weights were averaged."""
        return 0 if self._averages is None else self._averages.count

    # -- training ------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Create the averages."""
        if not pl_module.automatic_optimization:
            raise ValueError(
                "StochasticWeightAveraging needs automatic_optimization=True, but the task has "
                "automatic_optimization=False. Change the task, or remove the callback."
            )
        if not trainer.optimizers:
            raise ValueError(
                "StochasticWeightAveraging needs an optimizer, but configure_optimizers returned none. Return an "
                "optimizer, or use WeightAveraging, which does not set learning rates."
            )
        if isinstance(self.swa_epoch_start, float) and trainer.max_epochs == -1:
            raise ValueError(
                f"swa_epoch_start={self.swa_epoch_start} is a fraction of max_epochs, which is unlimited. Set "
                "Trainer(max_epochs=...), or pass swa_epoch_start as an int."
            )
        start = self.swa_epoch_start
        start = int(trainer.max_epochs * start) if isinstance(start, float) else start
        self._start = max(start - 1, 0)
        self._make_room(trainer, pl_module, False, self.device, strict=False)
        self._initial = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """From ``swa_epoch_start`` on, set the learning rates."""
        past = trainer.progress.epoch - self._start
        if past < 0:
            return
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        rates = self.swa_lrs if isinstance(self.swa_lrs, list) else [self.swa_lrs] * len(groups)
        if len(rates) != len(groups):
            raise ValueError(
                f"swa_lrs has {format_count(len(rates), 'rate')} for {format_count(len(groups), 'parameter group')}. "
                "Pass one rate per group, or a number for all groups."
            )
        if self._initial is None:
            self._initial = [[] for _ in trainer.optimizers]
            announce(
                f"stochastic weight averaging starts in epoch {trainer.progress.epoch}; the learning rate schedulers "
                "stop"
            )
        for initial, optimizer in zip(self._initial, trainer.optimizers, strict=True):
            initial += [float(group["lr"]) for group in optimizer.param_groups[len(initial) :]]  # also of later groups
        assert trainer.steps is not None
        trainer.steps.schedules.stop()
        share = min(1.0, past / self.annealing_epochs) if self.annealing_epochs else 1.0
        annealed = _STRATEGIES[self.annealing_strategy](share)
        for group, rate, initial_rate in zip(groups, rates, itertools.chain(*self._initial), strict=True):
            value = rate * annealed + initial_rate * (1 - annealed)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """From ``swa_epoch_start`` on, update the averages."""
        progress = trainer.progress
        if progress.epoch_is_over and progress.epoch >= self._start and progress.epoch > self._latest_epoch:
            assert self._averages is not None
            self._latest_epoch = progress.epoch
            self._averages.update(self._average)

    def on_train_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Put the averages, if any, into the model and recompute BatchNorm's statistics."""
        averages = self._averages
        if averages is not None and averages.count:
            self._ended = True
            averages.apply_to_model()
            measure(trainer, pl_module)
