"""What a Trainer is doing, in words that scripts compare with: enums that equal their strings."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_utilities.core.enums import StrEnum


class TrainerStatus(StrEnum):
    """How far the stage is that was called last."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """True once a stage has ended, by success or failure."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(StrEnum):
    """The method of the Trainer that was called."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(StrEnum):
    """What runs at the moment. ``fit`` trains, validates and runs the sanity check."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """True for a validation, the sanity check and a test."""
        return self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING, RunningStage.TESTING)

    @property
    def dataloader_prefix(self) -> str:
        """The word in the name of its dataloader method: ``"val"`` in ``val_dataloader``."""
        return "val" if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING) else str(self.value)


@dataclass
class TrainerState:
    """State of a Trainer.

    Attributes:
        status: How far it is.
        fn: The method that runs, or ran last; None before the first.
        stage: What runs at the moment; None if nothing does.
    """

    status: TrainerStatus = TrainerStatus.INITIALIZING
    fn: TrainerFn | None = None
    stage: RunningStage | None = None

    @property
    def finished(self) -> bool:
        """True once a stage has ended without an error."""
        return self.status == TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """True once a stage has ended, by success or failure."""
        return self.status.stopped
