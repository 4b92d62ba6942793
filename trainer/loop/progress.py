"""How far a run is: a few counters, and where between two optimizer steps it stands."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any


class Phase(Enum):
    """Where a run stands in its loop, in the order of an epoch. The values are stored in checkpoints."""

    BETWEEN_STEPS = "between_steps"  # ready for the next optimizer step
    IN_STEP = "in_step"  # micro-batches are being worked on; no checkpoint can be made
    STEP_TAKEN = "step_taken"  # the optimizer has stepped; logging, validation and checkpoints are to come
    ENDING_STEP = "ending_step"  # the step is logged, or was skipped; validation and checkpoints are to come
    EPOCH_TRAINED = "epoch_trained"  # the epoch's last step is over, and so are its validation and its schedulers
    EPOCH_END = "epoch_end"  # the epoch's end is being worked off; a checkpoint from here begins the next epoch


@dataclass(slots=True)
class Progress:
    """Counters of a run and its phase. Checkpoints are made between optimizer steps only, so these are all there is.

    The loop sets ``phase`` within an epoch itself, as a method for it would be one more call in each step.

    Attributes:
        epoch: Epochs completed.
        step: Optimizer steps that really happened.
        batch: Micro-batches of the current epoch, of this process.
        batches: Micro-batches of all epochs, of this process.
        samples: Samples trained on, over all processes.
        validated: What ``batches`` was at the newest validation, or when one would have been due.
        skipped: Optimizer steps that a float16 overflow or a non-finite loss prevented.
        seconds: Time spent in training, for ``max_time``.
        loaded: The epoch in which the loaders were asked for last.
        phase: See `Phase`.
    """

    epoch: int = 0
    step: int = 0
    batch: int = 0
    batches: int = 0
    samples: int = 0
    validated: int = 0
    skipped: int = 0
    seconds: float = 0.0
    loaded: int = 0
    phase: Phase = Phase.BETWEEN_STEPS

    # -- where it stands -----------------------------------------------------------------------------------------

    @property
    def in_step(self) -> bool:
        """True while the micro-batches of a step are being worked on, so that no checkpoint can be made."""
        return self.phase is Phase.IN_STEP

    @property
    def step_is_unfinished(self) -> bool:
        """True if the last step is taken, but its end, with its validation, is still to come."""
        return self.phase is Phase.STEP_TAKEN or self.phase is Phase.ENDING_STEP

    @property
    def epoch_is_trained(self) -> bool:
        """True if the epoch's last step is over, its validation and its schedulers too."""
        return self.phase is Phase.EPOCH_TRAINED or self.phase is Phase.EPOCH_END

    @property
    def epoch_is_over(self) -> bool:
        """True while the end of a complete epoch is worked off, and not for an epoch that a limit cut short."""
        return self.phase is Phase.EPOCH_END

    # -- transitions ---------------------------------------------------------------------------------------------

    def next_epoch(self) -> None:
        """Count the epoch as completed, and begin the next one."""
        self.epoch += 1
        self.restart_epoch()

    def restart_epoch(self) -> None:
        """Count the epoch's micro-batches from the beginning."""
        self.batch = 0
        self.phase = Phase.BETWEEN_STEPS

    def recount(self, batch: int) -> None:
        """Go on in the epoch with another world size, for which ``batch`` micro-batches of it are done."""
        more = batch - self.batch
        self.batch, self.batches, self.validated = batch, self.batches + more, self.validated + more

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all counters and the phase, by name."""
        state = replace(self)
        if state.epoch_is_over:
            state.next_epoch()
        return {**asdict(state), "phase": state.phase.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, of this version or an earlier one."""
        state = _add_phase(state_dict) if state_dict else {}
        for name, value in state.items():
            setattr(self, name, value)


def _add_phase(state: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state with its phase, which earlier versions stored as several flags."""
    if "phase" in state:
        return {**state, "phase": Phase(state["phase"])}
    if state.get("closed"):
        phase = Phase.EPOCH_TRAINED
    elif state.get("unended"):
        phase = Phase.STEP_TAKEN if state.get("ended") != state.get("step") else Phase.ENDING_STEP
    else:
        phase = Phase.BETWEEN_STEPS
    flags = ("closed", "closing", "ended", "unended", "within")
    return {**{name: value for name, value in state.items() if name not in flags}, "phase": phase}
