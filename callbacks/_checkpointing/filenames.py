"""Names and folders of checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.messages import name_type, nearest, warn
from ...common.remote_path import AnyPath, as_path, lexists
from ...engine.checkpoint import MANIFEST, atomic_swap, filesystem, store

_FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")


def fill_in(template: str, values: Mapping[str, Any], equals: str | None) -> str:
    """Replace the fields of a template with values. A missing value is written as 0, with a warning.

    ``equals`` is the text between a field's name and its value; None omits the name.
    """

    def fill(match: re.Match[str]) -> str:
        name, spec = match.group(1), match.group(2) or ""
        if name not in values:
            warn(
                f"the checkpoint name {template!r} uses {name!r}, which is not logged, so it is written as 0."
                f"{nearest(name, values)}"
            )
        try:
            text = format(values.get(name, 0), spec)
        except (ValueError, TypeError) as error:  # None and lists have no formats
            raise ValueError(
                f"the checkpoint name {template!r} cannot be formatted: {error}. Change the format of {name!r}, for "
                f"example to {{{name}:.2f}}."
            ) from error
        return text if equals is None else f"{name.replace('/', '_')}{equals}{text}"

    return _FIELD.sub(fill, template)


def check_place(dirpath: str | Path | None, filename: str | None) -> None:
    """Raise an error if the directory or the file name of checkpoints is invalid.

    Args:
        dirpath: Argument of `ModelCheckpoint`.
        filename: Argument of `ModelCheckpoint`.

    Raises:
        ValueError, TypeError: If an argument is invalid.
    """
    if dirpath is not None and not isinstance(dirpath, str | os.PathLike):
        raise TypeError(f"dirpath={dirpath!r} must be the path of a directory, not {name_type(dirpath)}.")
    if dirpath is not None:
        as_path(dirpath)
    if filename is None:
        return
    if not isinstance(filename, str):
        raise TypeError(
            f"filename={filename!r} must be a string such as '{{epoch}}-{{val_loss:.2f}}', not {name_type(filename)}."
        )
    if os.path.isabs(filename) or ".." in Path(filename).parts:
        raise ValueError(f"filename={filename!r} must be a relative path without '..'. Pass the directory as dirpath.")
    parts = filename.split("/")
    if not parts[-1] or any(part.startswith(".") for part in parts):
        raise ValueError(
            f"filename={filename!r} must not be empty or end with '/', and no part of it may begin with a dot, which "
            "marks incomplete checkpoints. Remove filename to use the default, '{epoch}-{step}'."
        )
    if re.search("[{}]", _FIELD.sub("", filename)):
        raise ValueError(
            f"filename={filename!r} has a brace that is not part of a field. Write a field as {{epoch}} or "
            "{val_loss:.2f}."
        )


@dataclass(frozen=True)
class CheckpointFilenames:
    """File names of the checkpoints of one `ModelCheckpoint`.

    Attributes:
        separator: Text between a name and its version.
        equals: Text between a field's name and its value; None omits the name.
    """

    template: str
    template_of_last: str
    extension: str
    separator: str
    equals: str | None

    @property
    def depth(self) -> int:
        """Number of folder levels in the names."""
        return max(0, *(len(Path(template).parts) - 1 for template in (self.template, self.template_of_last)))

    def fill_in(self, values: Mapping[str, Any], template: str | None = None, version: int | None = None) -> str:
        """Return the file name of a checkpoint, with values in the fields of the template.

        Args:
            values: Values for the fields of the template, by name.
            template: Template to fill in. Default: the attribute ``template``.
            version: Number in a suffix such as ``-v1``. Default: no suffix.

        Raises:
            ValueError: If a value cannot be written in its field's format.
        """
        name = fill_in(template or self.template, values, self.equals)
        suffix = "" if version is None else f"{self.separator}v{version}"
        return f"{name}{suffix}{self.extension}"


def is_taken(path: str, replaced: str) -> bool:
    """Return whether a path belongs to another checkpoint, which another run may still be writing.

    ``replaced`` is the path of this run's checkpoint that may be overwritten, unless it lost its manifest or another
    run has replaced it. In an object store, only the save checks this, because each check is a request.
    """
    place = as_path(path)
    if not isinstance(place, Path):
        return path != replaced and lexists(path)
    if path != replaced:
        return os.path.lexists(path) or atomic_swap.is_being_written(place)
    try:
        store.check_target(place)
    except ValueError:
        return True
    return bool(atomic_swap.explain_replaced(place, place))


def folders(directory: str | AnyPath, levels: int) -> list[AnyPath]:
    """Return a directory and its nested folders that may contain checkpoints.

    Folders that are hidden, unreadable or themselves checkpoints are excluded.

    Args:
        directory: Directory in which a callback saves checkpoints.
        levels: Number of levels to descend.
    """
    listed = level = [as_path(directory)]
    for _ in range(levels):
        paths = (parent / name for parent in level for name in filesystem.list_names(parent))
        level = [path for path in paths if _is_folder(path)]
        listed = listed + level
    return listed


def _is_folder(path: AnyPath) -> bool:
    if path.name.startswith(".") or not path.is_dir():
        return False
    if isinstance(path, Path) and not os.access(path, os.R_OK | os.X_OK):
        return False
    return not (path / MANIFEST).exists()
