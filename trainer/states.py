"""Enums and a dataclass that describe the state of a Trainer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TrainerStatus(StrEnum):
    """Status of the Trainer's current or last stage."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """True if the latest stage has ended, with or without an error."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(StrEnum):
    """Entry point of the Trainer, such as ``fit``."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(StrEnum):
    """Current activity of a stage, such as the validation within ``fit``."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """True if the activity is a validation, the sanity check or a test."""
        return self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING, RunningStage.TESTING)

    @property
    def dataloader_prefix(self) -> str:
        """Prefix of the activity's dataloader method: ``"val"`` in ``val_dataloader``."""
        return "val" if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING) else str(self.value)


@dataclass
class TrainerState:
    """State of a Trainer, in Lightning's form.

    Attributes:
        status: Status of the current or last stage.
        fn: The current or last entry point; None before the first.
        stage: The current activity; None between stages.
    """

    status: TrainerStatus = TrainerStatus.INITIALIZING
    fn: TrainerFn | None = None
    stage: RunningStage | None = None

    @property
    def finished(self) -> bool:
        """True if the latest stage has ended without an error or interruption."""
        return self.status == TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """True if the latest stage has ended, with or without an error."""
        return self.status.stopped
