"""What all progress bars have in common, whatever they draw with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ...engine.metrics import LateNumbers
from ..best_effort import BestEffortCallback

if TYPE_CHECKING:
    from ...trainer import TaskModule, Trainer


class ProgressBar(BestEffortCallback):
    """The base of a progress bar of your own: override the hooks you need, and `disable` and `enable`.

    A subclass finds here how many batches there are, what to call the stages and what to show beside them. It must call
    ``super().__init__()``, and ``super().setup(...)`` where it has a ``setup``. The Trainer adds no other bar then.
    """

    after_task = 3

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._current_eval_dataloader_idx: int | None = None
        self._late_numbers = LateNumbers()

    @property
    def trainer(self) -> Trainer:
        """Whose run is shown.

        Raises:
            TypeError: Before a stage has been set up.
        """
        if self._trainer is None:
            raise TypeError(f"{type(self).__name__}.trainer is not there before a stage begins.")
        return self._trainer

    # -- what users override -------------------------------------------------------------------------------------

    def disable(self) -> None:
        """Draw nothing any more. Called in ``setup`` on every process but rank zero.

        Raises:
            NotImplementedError: A bar must say how.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method disable() that turns it off.")

    def enable(self) -> None:
        """Draw again.

        Raises:
            NotImplementedError: A bar must say how.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method enable() that turns it on.")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` without tearing the bar; `Trainer.print` goes here."""
        print(*args, **kwargs)

    def get_metrics(self, trainer: Trainer, pl_module: TaskModule) -> dict[str, Any]:
        """What stands beside the bar: the first logger's version as ``v_num``, and what was logged for it.

        Between two steps on a GPU these are values of a moment ago, as the newest ones would have to be waited for.
        """
        if trainer.training and not trainer.progress.epoch_is_trained:
            return get_standard_metrics(trainer) | self._late_numbers.read(trainer.collect_bar_values())
        return get_standard_metrics(trainer) | trainer.progress_bar_metrics

    @property
    def sanity_check_description(self) -> str:
        """What to call the validation before training."""
        return "sanity check"

    @property
    def train_description(self) -> str:
        """What to call an epoch; its number follows."""
        return "epoch"

    @property
    def validation_description(self) -> str:
        """What to call a validation."""
        return "validation"

    @property
    def test_description(self) -> str:
        """What to call a test."""
        return "test"

    @property
    def predict_description(self) -> str:
        """What to call a prediction."""
        return "predict"

    # -- how many batches ----------------------------------------------------------------------------------------

    @property
    def total_train_batches(self) -> int | float:
        """Micro-batches of this epoch, fewer where ``max_steps`` ends it; infinite where that is not known."""
        trainer = self.trainer
        sources = trainer.sources
        batches = math.inf if sources is None else _count_batches(sources.train.length)
        if trainer.max_epochs == -1 and trainer.max_steps > 0:
            remaining_batches = (trainer.max_steps - trainer.progress.step) * trainer.accumulate_grad_batches
            return min(batches, trainer.progress.batch + remaining_batches)
        return batches

    @property
    def total_val_batches(self) -> int | float:
        """Batches of all validation loaders, where this epoch is validated at all; else 0."""
        trainer = self.trainer
        interval = trainer.check_val_every_n_epoch
        if not trainer.has_validation or (interval and (trainer.progress.epoch + 1) % interval):
            return 0
        return sum(self._get_lengths("val"))

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """Batches of the validation loader that runs."""
        return self._get_current_length("val")

    @property
    def total_test_batches_current_dataloader(self) -> int | float:
        """Batches of the test loader that runs."""
        return self._get_current_length("test")

    @property
    def total_predict_batches_current_dataloader(self) -> int | float:
        """Batches of the predict loader that runs."""
        return self._get_current_length("predict")

    def _get_current_length(self, kind: str) -> int | float:
        return self._get_lengths(kind)[self._current_eval_dataloader_idx or 0]

    def _get_lengths(self, kind: str) -> list[int | float]:
        sources = self.trainer.sources
        return [] if sources is None else [_count_batches(loader.length) for loader in sources.evaluation(kind)]

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Whether another loader has begun since the last call."""
        before, self._current_eval_dataloader_idx = self._current_eval_dataloader_idx, dataloader_idx
        return before != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Another evaluation begins."""
        self._current_eval_dataloader_idx = None

    # -- the run -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Get to know the trainer; off on every process but rank zero."""
        super().setup(trainer, pl_module, stage)
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()


def get_standard_metrics(trainer: Trainer) -> dict[str, int | str]:
    """Return what every progress bar shows: the first logger's version as ``v_num``, its last four characters."""
    version = getattr(trainer.logger, "version", None)
    return {} if version in (None, "") else {"v_num": version[-4:] if isinstance(version, str) else version}


def _count_batches(length: int | None) -> int | float:
    return math.inf if length is None else length
