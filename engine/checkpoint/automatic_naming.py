"""Automatically named checkpoints: ``project_dir/checkpoints/checkpoint_N``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...common.messages import warn
from ...common.remote_path import AnyPath, absolute, as_path
from ...strategies import World
from ..configuration import ProjectConfiguration
from . import filesystem, store
from .open_checkpoint import OpenCheckpoint, find_first_intact
from .train_state import STATE

_NAME = re.compile(r"checkpoint_(\d+)")
_REPLACED = re.compile(r"\.checkpoint_(\d+)\.(.+\.)?old")


def _require_folder(project: ProjectConfiguration, method: str, argument: str) -> AnyPath:
    if not project.automatic_checkpoint_naming or project.project_dir is None:
        raise ValueError(
            f"{method} was called without {argument}, but automatic checkpoint naming is not configured. Pass "
            f"{argument}, or create Accelerator(project_config=ProjectConfiguration(project_dir=..., "
            "automatic_checkpoint_naming=True))."
        )
    return as_path(project.project_dir) / "checkpoints"


def _list_numbers(folder: AnyPath, pattern: re.Pattern[str] = _NAME) -> list[int]:
    return sorted(int(match[1]) for name in filesystem.list_names(folder) if (match := pattern.fullmatch(name)))


def choose_next_target(project: ProjectConfiguration) -> AnyPath:
    """Return the path of the next automatically named checkpoint.

    Raises:
        ValueError: If automatic naming is not configured, or the folder already contains a checkpoint with the same or
            a higher number, for example because the run was not resumed.
    """
    folder = _require_folder(project, "save_state", "output_dir")
    numbers = _list_numbers(folder)
    if numbers and numbers[-1] >= project.iteration:
        raise ValueError(
            f"{folder} already has checkpoint_{numbers[-1]}, but this run would save checkpoint_{project.iteration}. "
            "Resume with load_state(), choose another project_dir, or set ProjectConfiguration(iteration="
            f"{numbers[-1] + 1})."
        )
    return folder / f"checkpoint_{project.iteration}"


def find_newest(
    world: World, project: ProjectConfiguration, resumable: bool = True
) -> tuple[OpenCheckpoint, list[str]]:
    """Return the intact checkpoint with the highest number, and a message for each one that was skipped.

    Call it on all ranks. With ``resumable``, checkpoints that contain weights only are skipped. Damaged checkpoints are
    not deleted, because another process may be saving to the folder.
    """
    skipped: list[str] = []
    opened = find_first_intact(world, _open_from_highest(project, resumable, skipped), skipped)
    with world.together():
        if opened is None and world.is_main:
            folder = _require_folder(project, "load_state", "input_dir")
            text = f"{folder} has no checkpoint that can be loaded. Pass input_dir, the path of a checkpoint."
            raise ValueError("\n  ".join([text, *skipped]))
    assert opened is not None
    return opened, world.broadcast(skipped)


def _open_from_highest(project: ProjectConfiguration, resumable: bool, skipped: list[str]) -> Iterator[OpenCheckpoint]:
    """Yield the usable checkpoints, highest number first, and add a message about each other one to ``skipped``."""
    folder = _require_folder(project, "load_state", "input_dir")
    for number in sorted({*_list_numbers(folder), *_list_numbers(folder, _REPLACED)}, reverse=True):
        path = folder / f"checkpoint_{number}"
        try:
            opened = OpenCheckpoint(path)
        except (OSError, ValueError) as error:
            skipped.append(str(error))
            continue
        if opened.has(STATE) or not resumable:
            yield opened
        else:
            skipped.append(f"{path} contains only weights, so no run can resume from it.")


def compute_next_iteration(project: ProjectConfiguration, loaded: AnyPath) -> int:
    """Return the number of the next checkpoint after a resume from ``loaded``.

    If ``loaded`` is in the project's folder of automatically named checkpoints, the result exceeds all numbers in this
    folder.
    """
    if not project.automatic_checkpoint_naming or project.project_dir is None:
        return project.iteration
    folder = as_path(project.project_dir) / "checkpoints"
    if absolute(loaded.parent) != absolute(folder):
        return project.iteration
    return max([project.iteration, *(number + 1 for number in _list_numbers(folder))])


def drop_oldest(folder: AnyPath, limit: int) -> None:
    """Delete the checkpoints with the lowest numbers until ``limit`` of them are left.

    If one cannot be deleted, this only causes a warning, because the new checkpoint is already saved.
    """
    numbers = [n for n in _list_numbers(folder) if (folder / f"checkpoint_{n}" / store.MANIFEST).is_file()]
    try:
        store.CheckpointStore(folder).recover()  # complete deletions that were interrupted by a kill
    except (OSError, ValueError) as error:
        reason = str(error).rstrip(".")
        warn(f"remains of older checkpoints in {folder} can't be deleted: {reason}. The next save tries again.")
    for number in numbers[:-limit]:
        try:
            store.remove(folder / f"checkpoint_{number}")
        except (OSError, ValueError) as error:
            reason = str(error).rstrip(".")
            warn(f"checkpoint_{number} in {folder} exceeds total_limit={limit}, but can't be deleted: {reason}.")
