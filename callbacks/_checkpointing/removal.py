"""Which checkpoints are kept, and how the others go."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from ...common.messages import warn
from ...engine.checkpoint import store


def best_of(scores: Mapping[str, Tensor], mode: str, worst: bool = False) -> str:
    """The path with the best score, or the worst one. NaN is worse than anything."""

    def rank(path: str) -> tuple[bool, float]:
        value = float(scores[path])
        return math.isnan(value), 0.0 if math.isnan(value) else value if mode == "min" else -value

    return (max if worst else min)(scores, key=rank)


def remove(path: str, directory: str, resumed: Path | None) -> bool:
    """Delete a checkpoint of ours, if it is there; returns whether it was deleted.

    Never the one the run was resumed from, by whatever name, nor one that is in another directory.
    """
    if Path(directory) not in Path(path).parents:
        return False
    try:
        if not os.path.exists(path) or (resumed is not None and resumed.exists() and os.path.samefile(resumed, path)):
            return False
        store.remove(path)
    except (OSError, ValueError) as error:  # the new one is saved; a leftover is no reason to end the run
        warn(f"{path} is not kept any more, but can't be removed: {error}")
        return False
    return True


def finish_removing(paths: Iterable[str], directory: str, step: int, resumed: Path | None) -> list[str]:
    """Delete what a killed run had replaced and could not remove; returns those that were still there to delete.

    Args:
        paths: what it was about to remove, as its newest checkpoint says.
        directory: where it saved.
        step: of that checkpoint. What was saved under such a name later on is another one.
        resumed: the checkpoint that the run goes on from.
    """
    left = [path for path in paths if os.path.isdir(path) and _step_of(path, after=step) < step]
    return [path for path in left if remove(path, directory, resumed)]


def is_abandoned(path: str, step: int, resumed_step: int | None) -> bool:
    """Whether this run saved it at this very step, before it was resumed from an earlier one."""
    return resumed_step is not None and step > resumed_step and _step_of(path, after=-1) == step


def _step_of(path: str, after: int) -> int:
    """The step a checkpoint was saved at; ``after`` if it can't be read."""
    try:
        return store.read_manifest(Path(path)).step
    except ValueError:
        return after
