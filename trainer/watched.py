"""Descriptions of a Trainer's run for the watchdog."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainer import Trainer


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
