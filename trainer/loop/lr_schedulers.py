"""Learning rate schedulers of a task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...callbacks import read_monitored_metric
from ..core import SchedulerConfig, TaskModule

if TYPE_CHECKING:
    from ..trainer import Trainer
    from .hook_table import Hooks


class Schedules:
    """Schedulers of a task, some of which step after optimizer steps and some after epochs.

    Attributes:
        by_step: Schedulers that step immediately after optimizer steps.
    """

    def __init__(self, trainer: Trainer, task: TaskModule, configs: list[SchedulerConfig]) -> None:
        by_step = [config for config in configs if config.interval == "step"]
        self.by_step = [config for config in by_step if not config.reduce_on_plateau]
        self._after_validation = [config for config in by_step if config.reduce_on_plateau]
        self._by_epoch = [config for config in configs if config.interval == "epoch"]
        self._trainer = trainer
        self._task = task
        self._default = type(task).lr_scheduler_step is TaskModule.lr_scheduler_step

    def stop(self) -> None:
        """Stop all schedulers, because a callback sets the learning rates from now on."""
        self.by_step, self._after_validation, self._by_epoch = [], [], []

    def attach(self, hooks: Hooks) -> None:
        """Add a hook that steps plateau schedulers by step after the step's validation, before anything is saved.

        Args:
            hooks: Dispatch table of the run.
        """
        if self._after_validation:
            progress = self._trainer.progress
            self._stepped_at = progress.step - progress.step_is_unfinished  # a resumed run repeats the validation
            hooks.on_step_end = (self._end_step, *hooks.on_step_end)  # type: ignore[attr-defined]  # set by name

    def _end_step(self) -> None:
        step = self._trainer.progress.step
        if step != self._stepped_at:  # otherwise the step was skipped
            self._stepped_at = step
            self._step(self._after_validation, step)

    def after_step(self) -> None:
        """Step the schedulers that are due after an optimizer step."""
        self._step(self.by_step, self._trainer.progress.step)

    def after_epoch(self) -> None:
        """Step the schedulers that are due after an epoch and its validation."""
        if any(config.reduce_on_plateau for config in self._by_epoch):
            self._trainer.update_train_epoch_values()  # a scheduler may monitor one of them
        self._step(self._by_epoch, self._trainer.progress.epoch + 1)

    def _step(self, configs: list[SchedulerConfig], count: int) -> None:
        """Step the schedulers whose ``frequency`` divides ``count``, the number of completed steps or epochs."""
        for config in configs:
            if config.frequency != 1 and count % config.frequency:
                continue
            metric = self._read_monitor(config) if config.reduce_on_plateau else None
            if config.reduce_on_plateau and metric is None:
                continue
            try:
                if not self._default:
                    self._task.lr_scheduler_step(config.scheduler, metric)
                elif metric is None:
                    config.scheduler.step()
                else:
                    config.scheduler.step(metric)
            except Exception as error:
                _explain(config.scheduler, error)
                raise

    def _read_monitor(self, config: SchedulerConfig) -> float | None:
        """Return the value that a plateau scheduler monitors; None if it was not logged and ``strict`` is False."""
        trainer = self._trainer
        keep = trainer.logbook.latest_validation.just_measured(trainer)
        name = config.monitor or ""
        if config.interval == "step":
            name = trainer.metrics.step_label(name)
        return read_monitored_metric(trainer, name, f"{type(config.scheduler).__name__}'s monitor", config.strict, keep)


def _explain(scheduler: Any, error: Exception) -> None:
    """Raise a ValueError if a scheduler cannot step because parameter groups were added to its optimizer."""
    parts = [scheduler, *getattr(scheduler, "_schedulers", ())]  # including those of a SequentialLR
    rate_count = min((len(part.base_lrs) for part in parts if hasattr(part, "base_lrs")), default=0)
    group_count = len(getattr(getattr(scheduler, "optimizer", None), "param_groups", ()))
    if 0 < rate_count < group_count:
        name = type(scheduler).__name__
        raise ValueError(
            f"{name} has learning rates for only {rate_count} of the {group_count} parameter groups in its optimizer "
            f"({error}). The other groups were added later, for example by BackboneFinetuning. Use a scheduler that "
            "scales the rate of each group, such as ExponentialLR or StepLR."
        ) from error
