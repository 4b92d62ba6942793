"""Deletion of checkpoints that are no longer kept."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...common.messages import warn
from ...common.remote_path import AnyPath, as_path
from ...engine.checkpoint import is_checkpoint, read_manifest, store


def remove(path: str, directory: str, resumed: str | None, plugin: Any = None) -> bool:
    """Delete a checkpoint if it exists, and return whether it was deleted. Warn if it cannot be deleted.

    The checkpoint that the run was resumed from is never deleted, nor are checkpoints in other directories.

    Args:
        path: Path of the checkpoint.
        directory: Directory of the callback's checkpoints.
        resumed: The checkpoint that the run was resumed from, or None.
        plugin: The user's ``CheckpointIO``, which has written the checkpoint. Default: none.
    """
    place = as_path(path)
    if as_path(directory) not in place.parents:
        return False
    try:
        if not place.exists() or (resumed is not None and _is_same(as_path(resumed), place)):
            return False
        if plugin is None or is_checkpoint(path):
            store.remove(path)
        else:
            plugin.remove_checkpoint(path)
    except (OSError, ValueError) as error:  # the new checkpoint is saved, so a leftover must not end the run
        warn(f"{path} is no longer among the checkpoints to keep, but cannot be deleted: {error}")
        return False
    return True


def _is_same(resumed: AnyPath, place: AnyPath) -> bool:
    if isinstance(resumed, Path) and isinstance(place, Path):
        return resumed.exists() and os.path.samefile(resumed, place)
    return resumed == place


def finish_removing(paths: Iterable[str], directory: str, step: int, resumed: str | None) -> list[str]:
    """Delete checkpoints that a killed run had replaced but not deleted, and return their paths.

    Args:
        paths: The replaced checkpoints.
        directory: Directory of the callback's checkpoints.
        step: Optimizer step of the latest checkpoint. Later checkpoints are kept.
        resumed: The checkpoint that the run resumes from, or None.
    """
    leftovers = [path for path in paths if is_checkpoint(path) and _read_step(path, default=step) < step]
    return [path for path in leftovers if remove(path, directory, resumed)]


def is_abandoned(path: str, step: int, resumed_step: int | None) -> bool:
    """Return whether this run saved ``path`` at the current step before it was resumed from an earlier step.

    Args:
        path: Path of the checkpoint.
        step: The current optimizer step.
        resumed_step: The step that the run was resumed from, or None.
    """
    return resumed_step is not None and step > resumed_step and _read_step(path, default=-1) == step


def _read_step(path: str, default: int) -> int:
    try:
        return read_manifest(path).step
    except ValueError:
        return default
