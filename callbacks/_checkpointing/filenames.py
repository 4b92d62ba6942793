"""Names of checkpoints: templates such as ``{epoch}-{val_loss:.2f}``, filled in."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.messages import nearest, warn
from ...common.remote_path import AnyPath, as_path
from ...engine.checkpoint import filesystem, store

_FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")


def fill_in(template: str, values: Mapping[str, Any], equals: str | None) -> str:
    """Fill in the fields of a template.

    Args:
        template: Fields are names in braces, optionally with a format after a colon.
        values: By name; one that is not among them counts as 0, with a warning.
        equals: Put between a field's name and its value; None leaves the name out. A ``/`` in the name becomes ``_``:
            as a folder it would hide the checkpoint.

    Raises:
        ValueError: If a field has a format that its value can't be written in.
    """

    def fill(match: re.Match[str]) -> str:
        name, spec = match.group(1), match.group(2) or ""
        if name not in values:
            warn(f"the checkpoint name {template!r} names {name!r}, which is not logged.{nearest(name, values)}")
        try:
            text = format(values.get(name, 0), spec)
        except ValueError as error:
            raise ValueError(f"the checkpoint name {template!r} can't be filled in: {error}.") from error
        return text if equals is None else f"{name.replace('/', '_')}{equals}{text}"

    return _FIELD.sub(fill, template)


def check_place(dirpath: str | Path | None, filename: str | None) -> None:
    """Raise ValueError or TypeError for a place that checkpoints can't be kept in, or a name they can't have."""
    if dirpath is not None and not isinstance(dirpath, str | os.PathLike):
        raise TypeError(f"dirpath={dirpath!r} must be a directory's path, not a {type(dirpath).__name__}.")
    if dirpath is not None:
        as_path(dirpath)
    if filename is None:
        return
    if not isinstance(filename, str):
        raise TypeError(f"filename={filename!r} must be a template such as '{{epoch}}-{{val_loss:.2f}}'.")
    if os.path.isabs(filename) or ".." in Path(filename).parts:
        raise ValueError(f"filename={filename!r} leads out of dirpath; give the directory as dirpath.")
    parts = filename.split("/")
    if not parts[-1] or any(part.startswith(".") for part in parts):
        raise ValueError(
            f"filename={filename!r} must end in a name, and no part of it may begin with a dot: those are the names of "
            "checkpoints that are not complete. Leave it out for '{epoch}-{step}'."
        )
    if re.search("[{}]", _FIELD.sub("", filename)):
        raise ValueError(
            f"filename={filename!r} has a brace that is not part of a field: write {{epoch}} or {{val_loss:.2f}}."
        )


@dataclass(frozen=True)
class CheckpointFilenames:
    """Names of the checkpoints of one `ModelCheckpoint`.

    Attributes:
        template: For ranked checkpoints.
        template_of_last: For the newest one.
        extension: Of every checkpoint.
        separator: Between a name and its version.
        equals: Between a field's name and its value; None leaves the name out.
    """

    template: str
    template_of_last: str
    extension: str
    separator: str
    equals: str | None

    @property
    def depth(self) -> int:
        """The number of folders that names may lead into."""
        return max(0, *(len(Path(template).parts) - 1 for template in (self.template, self.template_of_last)))

    def fill_in(self, values: Mapping[str, Any], template: str | None = None, version: int | None = None) -> str:
        """Return the name for these values, with a suffix such as ``-v1`` where a version is given."""
        name = fill_in(template or self.template, values, self.equals)
        suffix = "" if version is None else f"{self.separator}v{version}"
        return f"{name}{suffix}{self.extension}"


def folders(directory: str | AnyPath, levels: int) -> list[AnyPath]:
    """Return a directory and, so many levels down, the folders in it that may hold checkpoints."""
    listed = level = [as_path(directory)]
    for _ in range(levels):
        paths = (parent / name for parent in level for name in filesystem.list_names(parent))
        level = [path for path in paths if _is_folder(path)]
        listed = listed + level
    return listed


def _is_folder(path: AnyPath) -> bool:
    """Return whether a path can be searched, and is neither a checkpoint nor the remains of one."""
    if path.name.startswith(".") or not path.is_dir():
        return False
    if isinstance(path, Path) and not os.access(path, os.R_OK | os.X_OK):
        return False
    return not (path / store.MANIFEST).exists()
