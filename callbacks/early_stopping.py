"""Stop when a logged value no longer improves."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..common.messages import announce
from ..common.validation import check_bool, check_int, check_monitor, check_number, choose
from .callback import Callback
from .monitored_metric import MODES, checks_at_epoch_end, is_better, read_new_value

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class EarlyStoppingReason(Enum):
    """Why an `EarlyStopping` asked to stop."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


_STATE = ("best_score", "wait_count", "stopped_epoch", "stopping_reason_message")


class EarlyStopping(Callback):
    """Stop the run when ``monitor`` has not improved for ``patience`` checks.

    The value is one of all processes, so they all stop after the same step. ``min_epochs`` and ``min_steps`` of the
    Trainer are kept: the run goes on until they are reached. A resumed run that had been stopped stays so, unless its
    ``patience`` or thresholds are now such that it would not have been.

    Args:
        monitor: The logged value to watch.
        min_delta: How much better counts as better.
        patience: Checks without improvement before it stops. A check is an epoch, or a validation where it runs
            several times in an epoch or not in each.
        verbose: Say when it improves.
        mode: Whether ``"min"`` or ``"max"`` is best.
        strict: Whether a value that was never logged is an error; else that check is left out, with a warning.
        check_finite: Stop when the value is NaN or infinite.
        stopping_threshold: Stop once the value is better than this.
        divergence_threshold: Stop once the value is worse than this.
        check_on_train_epoch_end: Whether to check when an epoch ends, or after each validation. By default as said
            at ``patience``.
        log_rank_zero_only: Accepted for Lightning's signature; words come from rank zero always.

    Attributes:
        best_score: The best value so far, a 0-d tensor; at first the worst there is.
        wait_count: Checks since.
        stopped_epoch: The epoch it asked to stop in; 0 if it did not in this run.
        stopping_reason: Why it asked to.
        stopping_reason_message: The same in words; None if it did not.

    Raises:
        ValueError: For a mode that doesn't exist, a negative patience; in training, for a value that was never logged.
        TypeError: For an argument of another kind.
    """

    after_task = 1
    exchanges = True

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
        check_bool("log_rank_zero_only", log_rank_zero_only)
        at_end, above, below = check_on_train_epoch_end, stopping_threshold, divergence_threshold
        self.monitor = check_monitor(monitor)
        margin = abs(check_number("min_delta", min_delta))
        self.min_delta = margin if mode == "max" else -margin  # signed, as subclasses in public code subtract it
        self.patience = check_int("patience", patience, 0)
        self.verbose = check_bool("verbose", verbose)
        self.mode = choose("mode", mode, MODES)
        self.strict = check_bool("strict", strict)
        self.check_finite = check_bool("check_finite", check_finite)
        self.stopping_threshold = None if above is None else check_number("stopping_threshold", above)
        self.divergence_threshold = None if below is None else check_number("divergence_threshold", below)
        self.check_on_train_epoch_end = None if at_end is None else check_bool("check_on_train_epoch_end", at_end)
        # In the precision of what is compared with it: a rounded one is beaten by the very same value again.
        self.best_score: Tensor = torch.tensor(
            math.inf if mode == "min" else -math.inf, dtype=torch.float64, device="cpu"
        )
        self.wait_count = 0
        self.stopped_epoch = 0
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._decided_at: float | None = None  # the value it asked to stop at
        self._decided_after = 0  # and the wait_count

    @property
    def state_key(self) -> str:
        """See `Callback.state_key`."""
        return f"EarlyStopping(monitor={self.monitor!r}, mode={self.mode!r})"

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        decided = {"decided_at": self._decided_at, "decided_after": self._decided_after}
        decided["stopping_reason"] = self.stopping_reason.value
        return {name: getattr(self, name) for name in _STATE} | decided

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`. A state of an earlier version may lack the names that ``get`` asks for."""
        for name in _STATE:
            setattr(self, name, state_dict[name])
        self._decided_at = state_dict.get("decided_at")
        self._decided_after = state_dict.get("decided_after", self.wait_count)
        self.stopping_reason = EarlyStoppingReason(state_dict.get("stopping_reason", 0))

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Forget that another run was stopped; a resumed one gets that back after this."""
        if stage == "fit":
            self._forget_stop()

    def _forget_stop(self) -> None:
        self.stopped_epoch = 0
        self.stopping_reason, self.stopping_reason_message = EarlyStoppingReason.NOT_STOPPED, None

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Stop a resumed run that had been stopped already."""
        reason = self.stopping_reason_message
        if reason is None:
            return
        if self._find_exceeded_limit(self._decided_at, self._decided_after) is None:
            self._forget_stop()
            announce(f"early stopping: the run had been stopped ({reason}), but by its limits now it goes on")
            return
        announce(f"early stopping: the run had been stopped already ({reason}); with other limits it would go on")
        trainer.should_stop = True

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Check, unless that happens when epochs end."""
        if not (self._should_skip_check(trainer) or self._checks_at_epoch_end(trainer)):
            self._run_early_stopping_check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Check, if that happens when epochs end."""
        # An epoch that max_steps or a signal cut short is none: a resumed run checks at its real end.
        if not trainer.progress.epoch_is_over or self._should_skip_check(trainer):
            return
        if self._checks_at_epoch_end(trainer):
            self._run_early_stopping_check(trainer)

    def _checks_at_epoch_end(self, trainer: Trainer) -> bool:
        if self.check_on_train_epoch_end is not None:
            return self.check_on_train_epoch_end
        return checks_at_epoch_end(trainer)

    # Subclasses in public code call or override the methods from here on, hence Lightning's names.
    @property
    def monitor_op(self) -> Callable[[Tensor, Tensor], Tensor]:
        """``torch.lt`` or ``torch.gt``, whichever tells that its first argument is better."""
        return torch.lt if self.mode == "min" else torch.gt

    def _should_skip_check(self, trainer: Trainer) -> bool:
        """Return whether to leave out a check, the same on every rank."""
        return trainer.stage != "fit" or trainer.sanity_checking

    def _improvement_message(self, current: Tensor) -> str:
        """Return what is logged about an improvement to ``current``, before it is the best."""
        return f"{self.monitor} improved to {current.item():.4g}"

    def _run_early_stopping_check(self, trainer: Trainer) -> None:
        """Compare the monitored value, if it was measured since the last check, and stop the run if it is time."""
        value = read_new_value(trainer, self.monitor, "EarlyStopping", self.strict)
        if value is None:
            return  # no check, so no failure to improve
        should_stop, reason = self._evaluate_stopping_criteria(torch.tensor(value, dtype=torch.float64, device="cpu"))
        if should_stop:
            self.stopped_epoch = trainer.progress.epoch
            self.stopping_reason_message = reason
            self._decided_at, self._decided_after = value, self.wait_count
            if not trainer.should_stop:
                announce(f"early stopping: {self.stopping_reason_message}")
            trainer.should_stop = True

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        """Return whether to stop at ``current`` and why; updates the best value and the wait count."""
        reason = self._find_stopping_reason(current.item())
        if reason is None:
            return False, None
        self.stopping_reason, message = reason
        return True, message

    def _find_stopping_reason(self, value: float) -> tuple[EarlyStoppingReason, str] | None:
        """Return why to stop at ``value``, or None; keeps count."""
        reason = self._find_exceeded_limit(value, 0)
        if reason is not None:
            return reason
        if is_better(value, self.best_score.item(), self.mode, abs(self.min_delta)):
            if self.verbose:
                announce(self._improvement_message(torch.tensor(value, dtype=torch.float64, device="cpu")))
            self.best_score, self.wait_count = torch.tensor(value, dtype=torch.float64, device="cpu"), 0
            return None
        self.wait_count += 1
        return self._find_exceeded_limit(None, self.wait_count)

    def _find_exceeded_limit(self, value: float | None, waited: int) -> tuple[EarlyStoppingReason, str] | None:
        """The limit that ``value``, or so many checks without improvement, are beyond; None if there is none."""
        if value is not None:
            if self.check_finite and not math.isfinite(value):
                return EarlyStoppingReason.NON_FINITE_METRIC, f"{self.monitor} is {value}"
            if self.stopping_threshold is not None and is_better(value, self.stopping_threshold, self.mode):
                words = f"{self.monitor} = {value:.4g} is better than stopping_threshold = {self.stopping_threshold}"
                return EarlyStoppingReason.STOPPING_THRESHOLD, words
            if self.divergence_threshold is not None and is_better(self.divergence_threshold, value, self.mode):
                words = f"{self.monitor} = {value:.4g} is worse than divergence_threshold = {self.divergence_threshold}"
                return EarlyStoppingReason.DIVERGENCE_THRESHOLD, words
        if waited and waited >= self.patience:
            words = f"{self.monitor} has not improved on {self.best_score.item():.4g} in the last {waited} checks"
            return EarlyStoppingReason.PATIENCE_EXHAUSTED, words
        return None
