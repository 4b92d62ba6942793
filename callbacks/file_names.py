"""Names of checkpoints: templates such as ``{epoch}-{val_loss:.2f}``, filled in."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..strategies import nearest, warn

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
    """Raise ValueError for a place that checkpoints can't be kept in."""
    if dirpath is not None and "://" in str(dirpath):
        raise ValueError(f"dirpath={str(dirpath)!r} is no directory of a local or mounted file system.")
    if filename is not None and (os.path.isabs(filename) or ".." in Path(filename).parts):
        raise ValueError(f"filename={filename!r} leads out of dirpath; give the directory as dirpath.")


def depth(template: str) -> int:
    """How many folders a template's names lead into."""
    return max(0, len(Path(template).parts) - 1)


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
