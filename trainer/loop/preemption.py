"""End of a stage after a signal."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NoReturn

from ...common.messages import announce, warn

if TYPE_CHECKING:
    from ..trainer import Trainer


def save_and_leave(trainer: Trainer) -> NoReturn:
    """Save the run, if a checkpoint callback does so after this signal, and end it.

    Call it on all ranks, between two optimizer steps.

    Raises:
        Preempted: For every signal except Ctrl-C.
        KeyboardInterrupt: For Ctrl-C.
    """
    caught = trainer.preemption.agree_on_signal()
    assert caught is not None
    step = trainer.progress.step
    callbacks = trainer.checkpoint_callbacks
    if caught is signal.SIGINT:
        paths = [callback.save_now(trainer, preempted=False) for callback in callbacks if callback.save_on_exception]
    else:
        saving = [callback for callback in callbacks if callback.saves and not callback.save_weights_only]
        paths = [callback.save_now(trainer, preempted=True) for callback in saving[:1]]
    for path in paths:
        announce(
            f"{caught.name}: the run is saved as {path} (optimizer step {step}). To resume it, pass ckpt_path='auto'."
        )
    if not paths:
        warn(
            f"{caught.name} ends the run at optimizer step {step} without saving it, because the Trainer has no "
            "ModelCheckpoint that saves full checkpoints."
        )
    if trainer.last_step is not None:  # so that the exception below does not save the run again
        trainer.last_step.close()
        trainer.last_step = None
    trainer.preemption.leave()


def leave_now(trainer: Trainer) -> NoReturn:
    """End a stage that has nothing to save. Call it on all ranks.

    Raises:
        Preempted: For every signal except Ctrl-C.
        KeyboardInterrupt: For Ctrl-C.
    """
    caught = trainer.preemption.agree_on_signal()
    assert caught is not None
    what = "the sanity check" if trainer.sanity_checking else f"the {trainer.stage} stage, whose results are lost"
    announce(f"{caught.name} ends {what}")
    trainer.preemption.leave()
