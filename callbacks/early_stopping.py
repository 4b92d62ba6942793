"""Stop when a logged value no longer improves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..strategies import announce, choose
from .callback import Callback
from .monitor import MODES, better, monitored_value

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class EarlyStopping(Callback):
    """Stop the run when ``monitor`` has not improved for ``patience`` checks.

    The value is one of all processes, so they all stop after the same step.

    Args:
        monitor: the logged value to watch.
        min_delta: how much better counts as better.
        patience: checks without improvement before it stops. A check is a validation, or an epoch.
        verbose: say when it improves.
        mode: ``"min"`` or ``"max"``.
        strict: whether a value that was never logged is an error.
        check_finite: stop when the value is NaN or infinite.
        stopping_threshold: stop once the value is better than this.
        divergence_threshold: stop once the value is worse than this.
        check_on_train_epoch_end: check when an epoch ends rather than after each validation; by default where there
            is no validation.
        log_rank_zero_only: accepted for Lightning's signature; words come from rank zero always.

    Attributes:
        best_score: the best value so far, or None.
        wait_count: checks since.
        stopped_epoch: the epoch it stopped in; 0 if it did not.
        stopping_reason_message: why it stopped, in words; None if it did not.
    """

    after_task = 1

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        self.monitor = monitor
        self.min_delta = abs(min_delta)
        self.patience = patience
        self.verbose = verbose
        self.mode = choose("mode", mode, MODES)
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.best_score: float | None = None
        self.wait_count = 0
        self.stopped_epoch = 0
        self.stopping_reason_message: str | None = None

    @property
    def state_key(self) -> str:
        """See `Callback.state_key`."""
        return f"EarlyStopping(monitor={self.monitor!r}, mode={self.mode!r})"

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {
            "best_score": self.best_score,
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        for name, value in state_dict.items():
            setattr(self, name, value)

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Check, unless that happens when epochs end."""
        if trainer.training and not self.check_on_train_epoch_end:
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Check, if it was asked for or there is no validation."""
        at_end = self.check_on_train_epoch_end
        if at_end or (at_end is None and not trainer.has_validation):
            self._check(trainer)

    def _check(self, trainer: Trainer) -> None:
        value = monitored_value(trainer, self.monitor, "EarlyStopping(monitor", self.strict)
        if value is None:
            return
        reason = self._reason(value)
        if reason is not None:
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason_message = reason
            trainer.should_stop = True
            announce(f"early stopping: {reason}")

    def _reason(self, value: float) -> str | None:
        """Why to stop at ``value``, or None; keeps count."""
        if self.check_finite and not math.isfinite(value):
            return f"{self.monitor} is {value}"
        if self.stopping_threshold is not None and better(value, self.stopping_threshold, self.mode):
            return f"{self.monitor} = {value:.4g} is better than stopping_threshold = {self.stopping_threshold}"
        if self.divergence_threshold is not None and better(self.divergence_threshold, value, self.mode):
            return f"{self.monitor} = {value:.4g} is worse than divergence_threshold = {self.divergence_threshold}"
        if better(value, self.best_score, self.mode, self.min_delta if self.best_score is not None else 0.0):
            if self.verbose:
                announce(f"{self.monitor} improved to {value:.4g}")
            self.best_score, self.wait_count = value, 0
            return None
        self.wait_count += 1
        if self.wait_count >= self.patience:
            return f"{self.monitor} has not improved on {self.best_score:.4g} in the last {self.wait_count} checks"
        return None
