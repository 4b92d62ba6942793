"""Base class of all progress bars."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...engine.metrics import AsyncNumbers
from ..best_effort import BestEffortCallback

if TYPE_CHECKING:
    from ...trainer import TaskModule, Trainer


class ProgressBar(BestEffortCallback):
    """Base class of user-defined progress bars. Override `disable`, `enable` and the hooks that you need.

    A subclass that overrides ``__init__`` or ``setup`` must call the base class's version of it. If ``callbacks``
    contains such a bar, the Trainer does not add another one.

    Examples:
        >>> import treadle as tl
        >>> from treadle.callbacks import ProgressBar
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> class PrintBatches(ProgressBar):
        ...     def enable(self):
        ...         pass
        ...     def disable(self):
        ...         pass
        ...     def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        ...         print(f"{batch_idx + 1}/{self.total_train_batches}")
        >>> trainer = tl.Trainer(
        ...     max_epochs=1,
        ...     limit_train_batches=2,
        ...     limit_val_batches=0,
        ...     accelerator="cpu",
        ...     devices=1,
        ...     logger=False,
        ...     enable_checkpointing=False,
        ...     callbacks=PrintBatches(),
        ... )
        >>> trainer.fit(BoringModel())
        1/2
        2/2
    """

    after_task = 3

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._current_eval_dataloader_idx: int | None = None
        self._async_numbers = AsyncNumbers()

    @property
    def trainer(self) -> Trainer:
        """Trainer whose progress the bar shows.

        Raises:
            TypeError: If no stage has been set up yet.
        """
        if self._trainer is None:
            raise TypeError(f"{type(self).__name__}.trainer is not set before a stage begins. Read it in a hook.")
        return self._trainer

    # -- methods that may be overridden --------------------------------------------------------------------------

    def disable(self) -> None:
        """Stop drawing. Runs in ``setup`` on every process except rank zero."""
        raise NotImplementedError(f"{type(self).__name__} must define disable(), which stops drawing.")

    def enable(self) -> None:
        """Start drawing again."""
        raise NotImplementedError(f"{type(self).__name__} must define enable(), which starts drawing again.")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print a message. Override this method if a printed message would disrupt the bar.

        Args:
            args: Positional arguments of ``print``.
            kwargs: Keyword arguments of ``print``.
        """
        print(*args, **kwargs)

    def get_metrics(self, trainer: Trainer, pl_module: TaskModule) -> dict[str, Any]:
        """Return the values to show next to the bar.

        These are the values logged with ``prog_bar=True``. If none of them is a training loss, this process's loss of
        the latest batch is added as ``loss``, except in manual optimization. The first logger's version, if any, is
        added as ``v_num``. During an epoch on a CUDA device, the values may be slightly out of date.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """
        values = trainer.collect_bar_values()
        values = {**_find_loss(trainer, pl_module, values), **values}
        if trainer.training and not trainer.progress.epoch_is_trained:
            return {**self._async_numbers.read(values), **get_standard_metrics(trainer)}
        return {**{name: float(value) for name, value in values.items()}, **get_standard_metrics(trainer)}

    def get_epoch_metrics(self, trainer: Trainer, pl_module: TaskModule, first_step: int) -> dict[str, float]:
        """Return the values to print in the line of an epoch: those logged in it and in its latest validation.

        The loss is added as in `get_metrics`.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            first_step: Number of optimizer steps before the epoch.
        """
        logbook = trainer.logbook
        names = [entry.name for entry in trainer.metrics.entries]
        if logbook.latest_validation.step is not None and logbook.latest_validation.step > first_step:
            measured = logbook.latest_validation.names
            twins = {name for name in measured if name.endswith("_epoch") and name.removesuffix("_epoch") in measured}
            names += sorted(measured - twins)
        values = {name: logbook.callback_values[name] for name in names if name in logbook.callback_values}
        loss = _find_loss(trainer, pl_module, values)
        return {**{name: float(value) for name, value in loss.items()}, **values}

    @property
    def sanity_check_description(self) -> str:
        """Label of the bar during the sanity check."""
        return "sanity check"

    @property
    def train_description(self) -> str:
        """Label of the bar during training."""
        return "epoch"

    @property
    def validation_description(self) -> str:
        """Label of the bar during validation."""
        return "validation"

    @property
    def test_description(self) -> str:
        """Label of the bar during a test."""
        return "test"

    @property
    def predict_description(self) -> str:
        """Label of the bar during prediction."""
        return "predict"

    # -- numbers of batches --------------------------------------------------------------------------------------

    @property
    def total_train_batches(self) -> int | float:
        """Number of micro-batches in this epoch; infinite if unknown."""
        trainer = self.trainer
        sources = trainer.sources
        batches = math.inf if sources is None else _count_batches(sources.train.length)
        if trainer.max_epochs == -1 and trainer.max_steps > 0:
            remaining_batches = (trainer.max_steps - trainer.progress.step) * trainer.accumulate_grad_batches
            return min(batches, trainer.progress.batch + remaining_batches)
        return batches

    @property
    def total_val_batches(self) -> int | float:
        """Number of batches of all validation dataloaders; 0 if this epoch has no validation, infinite if unknown."""
        trainer = self.trainer
        interval = trainer.check_val_every_n_epoch
        if not trainer.has_validation or (interval and (trainer.progress.epoch + 1) % interval):
            return 0
        return sum(self._get_lengths("val"))

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """Number of batches of the current validation dataloader; infinite if unknown."""
        return self._get_current_length("val")

    @property
    def total_test_batches_current_dataloader(self) -> int | float:
        """Number of batches of the current test dataloader; infinite if unknown."""
        return self._get_current_length("test")

    @property
    def total_predict_batches_current_dataloader(self) -> int | float:
        """Number of batches of the current prediction dataloader; infinite if unknown."""
        return self._get_current_length("predict")

    def _get_current_length(self, kind: str) -> int | float:
        return self._get_lengths(kind)[self._current_eval_dataloader_idx or 0]

    def _get_lengths(self, kind: str) -> list[int | float]:
        sources = self.trainer.sources
        return [] if sources is None else [_count_batches(loader.length) for loader in sources.evaluation(kind)]

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Return whether another dataloader has started since the last call.

        Args:
            dataloader_idx: Index of the current dataloader.
        """
        previous_idx, self._current_eval_dataloader_idx = self._current_eval_dataloader_idx, dataloader_idx
        return previous_idx != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Reset the tracked dataloader index. Call this method before each evaluation."""
        self._current_eval_dataloader_idx = None

    # -- the run -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Disable the bar on every process except rank zero."""
        super().setup(trainer, pl_module, stage)
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()


def _find_loss(trainer: Trainer, task: TaskModule, values: Iterable[str]) -> dict[str, Any]:
    """Return the latest batch's loss, still on the device, by the name ``loss``; nothing if ``values`` name a loss."""
    losses = trainer.accelerator.accumulation.agreement.recent_losses
    is_shown = any("loss" in name and not name.startswith(("val", "test")) for name in values)
    return {} if is_shown or not losses or not task.automatic_optimization else {"loss": losses[-1]}


def get_standard_metrics(trainer: Trainer) -> dict[str, int | str]:
    """Return the version of the first logger, if any, under the name ``v_num``.

    Args:
        trainer: The Trainer.
    """
    version = getattr(trainer.logger, "version", None)
    return {} if version in (None, "") else {"v_num": version[-4:] if isinstance(version, str) else version}


def _count_batches(length: int | None) -> int | float:
    return math.inf if length is None else length
