"""Progress of a run: its counters, and its phase within the loop."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any


class Phase(Enum):
    """Phase of a run in its loop, in the order of an epoch. The values are stored in checkpoints."""

    BETWEEN_STEPS = "between_steps"  # ready for the next optimizer step
    IN_STEP = "in_step"  # processing micro-batches; no checkpoint can be made
    STEP_TAKEN = "step_taken"  # the optimizer has stepped; logging, validation and checkpoints follow
    ENDING_STEP = "ending_step"  # the step is logged, or was skipped; validation and checkpoints follow
    EPOCH_TRAINED = "epoch_trained"  # the epoch's last step, its validation and its schedulers are done
    EPOCH_END = "epoch_end"  # the hooks of the epoch's end run; a checkpoint from here begins the next epoch


@dataclass(slots=True)
class Progress:
    """Counters and phase of a run. Checkpoints store them.

    Attributes:
        epoch: Number of completed epochs.
        step: Number of optimizer steps taken, not counting skipped steps. In manual optimization, the number of batches
            in which an optimizer stepped; without optimizers, the number of all batches.
        batch: Number of micro-batches that this process has completed in the current epoch.
        batches: Number of micro-batches that this process has completed in all epochs.
        last_batch: Value of ``batch`` at the end of the latest completed epoch.
        refused: Number of epochs that ended because ``on_train_batch_start`` returned -1.
        last_refused: Whether the latest completed epoch ended so.
        samples: Number of training samples processed, over all processes.
        validated: Value of ``batches`` when a validation was last due.
        skipped: Number of optimizer steps skipped because a loss or gradient was not finite.
        seconds: Training time in seconds, for ``max_time``.
        loaded: Index of the epoch in which the training dataloaders were last created.
        val_loaded: Index of the epoch whose validation is the first one for which the validation dataloaders were
            created; -1 if they were created before an epoch without validation.
        phase: Current phase of the loop; see `Phase`.

    Examples:
        >>> from treadle.trainer import Progress
        >>> progress = Progress(epoch=1, step=128, batch=10)
        >>> progress.next_epoch()
        >>> progress.epoch, progress.step, progress.batch
        (2, 128, 0)
    """

    epoch: int = 0
    step: int = 0
    batch: int = 0
    batches: int = 0
    last_batch: int = 0
    refused: int = 0
    last_refused: bool = False
    samples: int = 0
    validated: int = 0
    skipped: int = 0
    seconds: float = 0.0
    loaded: int = 0
    val_loaded: int = -1
    phase: Phase = Phase.BETWEEN_STEPS

    # -- position ------------------------------------------------------------------------------------------------

    @property
    def in_step(self) -> bool:
        """True while the micro-batches of a step are being processed."""
        return self.phase is Phase.IN_STEP

    @property
    def step_is_unfinished(self) -> bool:
        """True from the end of a step until the logging and validation that follow it are done."""
        return self.phase is Phase.STEP_TAKEN or self.phase is Phase.ENDING_STEP

    @property
    def epoch_is_trained(self) -> bool:
        """True if no further step of the epoch follows."""
        return self.phase is Phase.EPOCH_TRAINED or self.phase is Phase.EPOCH_END

    @property
    def epoch_is_over(self) -> bool:
        """True while the hooks at the end of the epoch run.

        False if a limit ended the run within the epoch, because a resumed run continues that epoch.
        """
        return self.phase is Phase.EPOCH_END

    # -- transitions ---------------------------------------------------------------------------------------------

    def end_epoch(self, refused: bool) -> None:
        """Begin the hooks at the end of the epoch.

        Args:
            refused: Whether ``on_train_batch_start`` returned -1, which ended the epoch.
        """
        self.phase = Phase.EPOCH_END
        self.last_batch, self.last_refused, self.refused = self.batch, refused, self.refused + refused

    def next_epoch(self) -> None:
        """Count the epoch as completed and begin the next one."""
        self.epoch += 1
        self.restart_epoch()

    def restart_epoch(self) -> None:
        """Reset the phase and the counter of micro-batches to the start of an epoch."""
        self.batch = 0
        self.phase = Phase.BETWEEN_STEPS

    def recount(self, batch: int) -> None:
        """Adjust the counters of a run that resumes in the middle of an epoch with a different world size.

        Args:
            batch: Number of micro-batches completed in the epoch, converted to the current world size.
        """
        more = batch - self.batch
        self.batch, self.batches, self.validated = batch, self.batches + more, self.validated + more

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the phase by name.

        While an epoch is ending, these are the values with which the next epoch begins.
        """
        state = replace(self)
        if state.epoch_is_over:
            state.next_epoch()
        return {**asdict(state), "phase": state.phase.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Args:
            state_dict: Result of `state_dict`.
        """
        for name, value in state_dict.items():
            setattr(self, name, Phase(value) if name == "phase" else value)
