"""Names of checkpoints: templates such as ``{epoch}-{val_loss:.2f}``, filled in."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...common.messages import nearest, warn
from ...engine.checkpoint import store

_FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")


def fill_in(template: str, values: Mapping[str, Any], equals: str | None) -> str:
    """The template with its fields filled in.

    Args:
        template: fields are names in braces, with a format after a colon if you like.
        values: by name; one that is not among them counts as 0, with a warning.
        equals: put between a field's name and its value; None leaves the name out. A ``/`` in the name becomes ``_``:
            as a folder it would hide the checkpoint.

    Raises:
        ValueError: if a field has a format that its value can't be written in.
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
    if dirpath is not None and "://" in str(dirpath):
        raise ValueError(f"dirpath={str(dirpath)!r} is no directory of a local or mounted file system.")
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
            f"filename={filename!r} has a brace that is no part of a field: write {{epoch}} or {{val_loss:.2f}}."
        )


def depth(template: str) -> int:
    """How many folders a template's names lead into."""
    return max(0, len(Path(template).parts) - 1)


def folders(directory: str | Path, levels: int) -> list[Path]:
    """A directory and, so many levels down, the folders in it that checkpoints may be in."""
    found = level = [Path(directory)]
    for _ in range(levels):
        level = [path for parent in level if parent.is_dir() for path in sorted(parent.iterdir()) if _is_folder(path)]
        found = found + level
    return found


def _is_folder(path: Path) -> bool:
    """Whether it may be searched, and is neither a checkpoint nor what a killed run left of one."""
    if path.name.startswith(".") or not path.is_dir() or not os.access(path, os.R_OK | os.X_OK):
        return False
    return not (path / store.MANIFEST).exists()


class NamedCheckpoints:
    """The part of a `ModelCheckpoint` that names files; its constants may be set on a subclass, as in Lightning."""

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    dirpath: str | None
    filename: str | None
    auto_insert_metric_name: bool

    @property
    def name_depth(self) -> int:
        """How many folders below ``dirpath`` the names of checkpoints may lead into."""
        return max(depth(self.filename or ""), depth(self.CHECKPOINT_NAME_LAST))

    def format_checkpoint_name(
        self, metrics: dict[str, Any], filename: str | None = None, ver: int | None = None
    ) -> str:
        """The path for these values.

        Args:
            metrics: by name; one that the template names and that is not among them counts as 0.
            filename: the template; by default ``filename`` of the callback.
            ver: the number for a suffix like ``-v1``.

        Raises:
            ValueError: if the template has a format that its value can't be written in.
        """
        template = filename or self.filename or f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}"
        equals = self.CHECKPOINT_EQUALS_CHAR if self.auto_insert_metric_name else None
        name = fill_in(template, metrics, equals)
        if ver is not None:
            name = f"{name}{self.CHECKPOINT_JOIN_CHAR}v{ver}"
        return os.path.join(self.dirpath or "", name + self.FILE_EXTENSION)
