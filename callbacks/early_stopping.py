"""Stop when a logged value no longer improves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..strategies import announce, choose, warn
from .callback import Callback
from .monitor import MODES, ValidationWatch, better, logged_values, never_logged

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer

_STATE = ("best_score", "wait_count", "stopped_epoch", "stopping_reason_message")


class EarlyStopping(Callback):
    """Stop the run when ``monitor`` has not improved for ``patience`` checks.

    The value is one of all processes, so they all stop after the same step. ``min_epochs`` and ``min_steps`` of the
    Trainer are kept: the run goes on until they are reached.

    Args:
        monitor: the logged value to watch.
        min_delta: how much better counts as better.
        patience: checks without improvement before it stops. A check is an epoch, or a validation where it runs
            several times in an epoch or not in each.
        verbose: say when it improves.
        mode: whether ``"min"`` or ``"max"`` is best.
        strict: whether a value that was never logged is an error; else that check is left out, with a warning.
        check_finite: stop when the value is NaN or infinite.
        stopping_threshold: stop once the value is better than this.
        divergence_threshold: stop once the value is worse than this.
        check_on_train_epoch_end: whether to check when an epoch ends, or after each validation. By default as said
            at ``patience``.
        log_rank_zero_only: accepted for Lightning's signature; words come from rank zero always.

    Attributes:
        best_score: the best value so far, a 0-d tensor; at first the worst there is.
        wait_count: checks since.
        stopped_epoch: the epoch it asked to stop in; 0 if it did not.
        stopping_reason_message: why it asked to, in words; None if it did not.

    Raises:
        ValueError: for a mode that doesn't exist, a negative patience; in training, for a value that was never logged.
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
        if not isinstance(patience, int) or patience < 0:
            raise ValueError(f"patience={patience!r} must be a whole number of checks, at least 0.")
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
        self.best_score: Tensor = torch.tensor(math.inf if mode == "min" else -math.inf)
        self.wait_count = 0
        self.stopped_epoch = 0
        self.stopping_reason_message: str | None = None
        self._watch = ValidationWatch()

    @property
    def state_key(self) -> str:
        """See `Callback.state_key`."""
        return f"EarlyStopping(monitor={self.monitor!r}, mode={self.mode!r})"

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        for name in _STATE:
            setattr(self, name, state_dict[name])

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Forget the validations of another run."""
        self._watch = ValidationWatch()

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Check, unless that happens when epochs end."""
        if trainer.training:
            self._watch.end(trainer)
            if not self._at_epoch_end(trainer):
                self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Check, if that happens when epochs end."""
        # An epoch that max_steps or a signal cut short is none: a resumed run checks at its real end.
        if trainer.progress.closing and self._at_epoch_end(trainer):
            self._check(trainer)

    def _at_epoch_end(self, trainer: Trainer) -> bool:
        if self.check_on_train_epoch_end is not None:
            return self.check_on_train_epoch_end
        # When an epoch ends, its training values can be watched as well as those of its one validation.
        once = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
        return once or not trainer.has_validation

    def _check(self, trainer: Trainer) -> None:
        if self.monitor in self._watch.stale(trainer):
            return  # not measured since: no check, so no failure to improve
        values = logged_values(trainer, keep=self._watch.just_measured(trainer))
        value = values.get(self.monitor)
        if value is None:
            if trainer.has_validation and self._watch.step is None:
                return  # no validation yet
            if self.strict:
                raise never_logged(trainer, self.monitor, "EarlyStopping's monitor", values)
            warn(f"EarlyStopping(strict=False) leaves out a check: {self.monitor!r} was never logged.")
            return
        reason = self._reason(value)
        if reason is not None:
            self.stopped_epoch = trainer.progress.epoch
            self.stopping_reason_message = reason
            if not trainer.should_stop:
                announce(f"early stopping: {reason}")
            trainer.should_stop = True

    def _reason(self, value: float) -> str | None:
        """Why to stop at ``value``, or None; keeps count."""
        best = self.best_score.item()
        if self.check_finite and not math.isfinite(value):
            return f"{self.monitor} is {value}"
        if self.stopping_threshold is not None and better(value, self.stopping_threshold, self.mode):
            return f"{self.monitor} = {value:.4g} is better than stopping_threshold = {self.stopping_threshold}"
        if self.divergence_threshold is not None and better(self.divergence_threshold, value, self.mode):
            return f"{self.monitor} = {value:.4g} is worse than divergence_threshold = {self.divergence_threshold}"
        if better(value, best, self.mode, self.min_delta):
            if self.verbose:
                announce(f"{self.monitor} improved to {value:.4g}")
            self.best_score, self.wait_count = torch.tensor(value), 0
            return None
        self.wait_count += 1
        if self.wait_count >= self.patience:
            return f"{self.monitor} has not improved on {best:.4g} in the last {self.wait_count} checks"
        return None
