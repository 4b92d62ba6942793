"""`EarlyStopping`: stops the run when a logged value no longer improves."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from types import MappingProxyType
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
    """Reason for which an `EarlyStopping` stopped the run."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


# Argument that decides about a stop, by its reason.
_ARGUMENTS = {
    EarlyStoppingReason.STOPPING_THRESHOLD: "stopping_threshold",
    EarlyStoppingReason.DIVERGENCE_THRESHOLD: "divergence_threshold",
    EarlyStoppingReason.PATIENCE_EXHAUSTED: "patience",
    EarlyStoppingReason.NON_FINITE_METRIC: "check_finite",
}
_STATE = ("best_score", "wait_count", "stopped_epoch", "stopping_reason_message")


class EarlyStopping(Callback):
    """Callback that stops the run when ``monitor`` has not improved for ``patience`` checks.

    All processes stop after the same step, once the Trainer's ``min_epochs`` and ``min_steps`` are reached. Until then,
    each check decides anew, so the run continues if ``monitor`` recovers. If a run is resumed from a checkpoint that
    was saved after the stop, it ends again, unless the current arguments, for example a larger ``patience``, allow it
    to continue.

    Args:
        monitor: Name of the logged value.
        min_delta: Change that an improvement must exceed. The sign is ignored. Default: 0.0.
        patience: Number of checks without improvement before the run stops; 0 has the same effect as 1. Default: 3.
        verbose: Announce improvements of ``monitor``. Default: False.
        mode: ``"min"`` if lower values are better, ``"max"`` if higher values are better. Default: ``"min"``.
        strict: Raise an error at a check if ``monitor`` was never logged. If False, a warning is issued instead. In a
            run with validation, neither happens before the first validation. Default: True.
        check_finite: Stop if the value is NaN or infinite. Default: True.
        stopping_threshold: Stop once the value is better than this threshold. Default: None.
        divergence_threshold: Stop once the value is worse than this threshold. Default: None.
        check_on_train_epoch_end: Check at the end of complete epochs (True) or after each validation (False). Default:
            None, which selects False in a run with validation if ``val_check_interval`` is not 1.0 or
            ``check_val_every_n_epoch`` is not 1, and True otherwise.
        log_rank_zero_only: Ignored; accepted for compatibility with Lightning. Default: False.

    Attributes:
        best_score: Value of the latest improvement, a 0-d tensor; infinite before the first improvement.
        wait_count: Number of consecutive checks without improvement.
        stopped_epoch: Index of the epoch in which the callback stopped the run; 0 if it did not stop this run.
        stopping_reason: The reason for the stop, as an `EarlyStoppingReason`.
        stopping_reason_message: The reason for the stop, as text, or None.

    Raises:
        ValueError, TypeError: If an argument is invalid. In ``fit``, if ``strict`` is set and ``monitor`` was not
            logged.

    Examples:
        >>> import treadle as tl
        >>> from treadle.callbacks import EarlyStopping
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> class Constant(BoringModel):
        ...     def on_train_epoch_end(self):
        ...         self.log("score", 1.0)
        >>> trainer = tl.Trainer(
        ...     max_epochs=10,
        ...     limit_train_batches=1,
        ...     limit_val_batches=0,
        ...     accelerator="cpu",
        ...     devices=1,
        ...     logger=False,
        ...     enable_checkpointing=False,
        ...     enable_progress_bar=False,
        ...     callbacks=EarlyStopping("score", patience=2),
        ... )
        >>> trainer.fit(Constant())
        >>> trainer.current_epoch
        3
    """

    after_task = 1
    exchanges = True
    mode_dict = MappingProxyType({"min": torch.lt, "max": torch.gt})
    order_dict = MappingProxyType({"min": "<", "max": ">"})

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
        self.min_delta = margin if mode == "max" else -margin  # signed, because subclasses in public code subtract it
        self.patience = check_int("patience", patience, 0)
        self.verbose = check_bool("verbose", verbose)
        self.mode = choose("mode", mode, MODES)
        self.strict = check_bool("strict", strict)
        self.check_finite = check_bool("check_finite", check_finite)
        self.stopping_threshold = None if above is None else check_number("stopping_threshold", above)
        self.divergence_threshold = None if below is None else check_number("divergence_threshold", below)
        self.check_on_train_epoch_end = None if at_end is None else check_bool("check_on_train_epoch_end", at_end)
        # Not rounded: otherwise the same value would count as an improvement over its rounded copy.
        self.best_score: Tensor = torch.tensor(
            math.inf if mode == "min" else -math.inf, dtype=torch.float64, device="cpu"
        )
        self.wait_count = 0
        self.stopped_epoch = 0
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._decided_at: float | None = None  # the value at which it stopped the run
        self._decided_after = 0  # the wait_count at which it stopped the run

    @property
    def state_key(self) -> str:
        """Name under which the callback's state is saved. It includes the class, ``monitor`` and ``mode``."""
        return f"{type(self).__qualname__}(monitor={self.monitor!r}, mode={self.mode!r})"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the callback."""
        decided = {"decided_at": self._decided_at, "decided_after": self._decided_after}
        decided["stopping_reason"] = self.stopping_reason.value
        return {name: getattr(self, name) for name in _STATE} | decided

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        for name in _STATE:
            if name in state_dict:  # Lightning before 2.6 saves no reason
                setattr(self, name, state_dict[name])
        self._decided_at = state_dict.get("decided_at")
        self._decided_after = state_dict.get("decided_after", self.wait_count)
        self.stopping_reason = EarlyStoppingReason(state_dict.get("stopping_reason", 0))

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """In ``fit``, reset the stopping epoch and reason of an earlier run."""
        if stage == "fit":
            self._forget_stop()

    def _forget_stop(self) -> None:
        self.stopped_epoch = 0
        self.stopping_reason, self.stopping_reason_message = EarlyStoppingReason.NOT_STOPPED, None

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Stop a resumed run that the callback had already stopped, unless the current arguments let it continue."""
        reason, progress = self.stopping_reason_message, trainer.progress
        if reason is None:
            return
        # A limit holds the stop back.
        if progress.epoch < (trainer.min_epochs or 0) or progress.step < (trainer.min_steps or 0):
            trainer.stop_requests.add(id(self))
            return
        exceeded = self._find_exceeded_limit(self._decided_at, self._decided_after)
        if exceeded is None:
            argument = _ARGUMENTS.get(self.stopping_reason, "criterion")
            self._forget_stop()
            announce(
                f"early stopping had ended this run ({reason}), but the run continues, because EarlyStopping has a "
                f"different {argument}"
            )
            return
        announce(
            f"early stopping had already ended this run ({reason}). To continue the run, change the "
            f"argument {_ARGUMENTS[exceeded[0]]} of EarlyStopping."
        )
        trainer.stop_requests.add(id(self))

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Check the monitored value if checks run after each validation."""
        if not (self._should_skip_check(trainer) or self._checks_at_epoch_end(trainer)):
            self._run_early_stopping_check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Check the monitored value if checks run at the end of epochs."""
        # An epoch cut short by max_steps or a signal does not count: a resumed run checks at its real end.
        if not trainer.progress.epoch_is_over or self._should_skip_check(trainer):
            return
        if self._checks_at_epoch_end(trainer):
            self._run_early_stopping_check(trainer)

    def _checks_at_epoch_end(self, trainer: Trainer) -> bool:
        if self.check_on_train_epoch_end is not None:
            return self.check_on_train_epoch_end
        return checks_at_epoch_end(trainer)

    # Subclasses in public code call or override the following methods, which therefore have Lightning's names.
    @property
    def monitor_op(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Comparison that returns whether its first argument is better: ``torch.lt`` or ``torch.gt``."""
        return self.mode_dict[self.mode]

    def _should_skip_check(self, trainer: Trainer) -> bool:
        return trainer.stage != "fit" or trainer.sanity_checking

    def _improvement_message(self, current: Tensor) -> str:
        return f"{self.monitor} improved to {current.item():.4g}"

    def _run_early_stopping_check(self, trainer: Trainer) -> None:
        value = read_new_value(trainer, self.monitor, "EarlyStopping", self.strict)
        if value is None:
            return  # without a check the wait count stays
        should_stop, reason = self._evaluate_stopping_criteria(torch.tensor(value, dtype=torch.float64, device="cpu"))
        if should_stop:
            self.stopped_epoch = trainer.progress.epoch
            self.stopping_reason_message = reason
            self._decided_at, self._decided_after = value, self.wait_count
            if not trainer.should_stop:
                announce(f"early stopping: {self.stopping_reason_message}")
            trainer.stop_requests.add(id(self))
        elif id(self) in trainer.stop_requests:  # min_epochs or min_steps held the stop back
            announce(f"early stopping: withdrawn, because {self.monitor} = {value:.4g} gives no reason to stop")
            trainer.stop_requests.discard(id(self))
            self._forget_stop()

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        """Update the best value and the wait count. Return whether to stop, and why."""
        current = torch.tensor(current.item(), dtype=torch.float64, device="cpu")
        exceeded = self._find_exceeded_limit(current.item(), 0)
        if exceeded is None and is_better(current.item(), self.best_score.item(), self.mode, abs(self.min_delta)):
            if self.verbose:
                announce(self._improvement_message(current))
            self.best_score, self.wait_count = current, 0
        elif exceeded is None:
            self.wait_count += 1
            exceeded = self._find_exceeded_limit(None, self.wait_count)
        if exceeded is None:
            return False, None
        self.stopping_reason, message = exceeded
        return True, message

    def _find_exceeded_limit(self, value: float | None, waited: int) -> tuple[EarlyStoppingReason, str] | None:
        if value is not None:
            if self.check_finite and not math.isfinite(value):
                return EarlyStoppingReason.NON_FINITE_METRIC, f"{self.monitor} = {value} is not finite"
            if self.stopping_threshold is not None and is_better(value, self.stopping_threshold, self.mode):
                words = f"{self.monitor} = {value:.4g} is better than stopping_threshold = {self.stopping_threshold}"
                return EarlyStoppingReason.STOPPING_THRESHOLD, words
            if self.divergence_threshold is not None and is_better(self.divergence_threshold, value, self.mode):
                words = f"{self.monitor} = {value:.4g} is worse than divergence_threshold = {self.divergence_threshold}"
                return EarlyStoppingReason.DIVERGENCE_THRESHOLD, words
        if waited and waited >= self.patience:
            checks = "check" if waited == 1 else f"{waited} checks"
            words = f"{self.monitor} has not improved on {self.best_score.item():.4g} in the last {checks}"
            return EarlyStoppingReason.PATIENCE_EXHAUSTED, words
        return None
