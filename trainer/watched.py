"""Descriptions of a Trainer's run for the watchdog."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..strategies.distributed import name_phase
from .loop import ClosureSteps, EvaluationLoop, FitLoop, ManualSteps, Stage, Steps

if TYPE_CHECKING:
    from .trainer import Trainer

name_phase("setup", Stage._set_up, loop=True)
name_phase("teardown", Stage._clean_up, loop=True)
name_phase("training", FitLoop._epoch, FitLoop._end_of_step, loop=True)
name_phase("forward", Steps.take, ManualSteps.take, ClosureSteps.take, loop=True)
name_phase("optimizer step", Steps._optimize, loop=True)
name_phase("evaluation", EvaluationLoop.run, EvaluationLoop._run_loader, EvaluationLoop._fire, loop=True)


def locate(trainer: Trainer) -> tuple[str, Any]:
    """Return the position of the run as text, and counters that change while it makes progress.

    Args:
        trainer: The Trainer.
    """
    progress = trainer.progress
    return f"epoch {progress.epoch}, optimizer step {progress.step + 1}", (progress.batches, trainer.evaluation_batch)


def find_directory(trainer: Trainer) -> Any:
    """Return the run's folder, or the Trainer's ``default_root_dir`` if it has no folder.

    Args:
        trainer: The Trainer.
    """
    return trainer.log_dir or trainer.default_root_dir
