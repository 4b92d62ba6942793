"""Migration of a project's files: their selection, reading and replacement."""

from __future__ import annotations

import difflib
import io
import os
import re
import stat
import tokenize
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...engine.weights import write_atomically
from .differences import Finding
from .notebooks import migrate_notebook
from .other_files import find_requirements, is_text, migrate_text
from .python_source import mentions_peer, migrate_source

_SKIPPED = ("node_modules", "site-packages", "__pycache__", "__pypackages__")
_RECORDS = ("lightning_logs", "mlruns", "wandb")  # files that runs have written are records and not changed
_LARGEST_TEXT = 1 << 20  # bytes of a configuration; a larger JSON file is data
_UNREADABLE = "cannot be read and is unchanged"
_PYTHON = (".py", ".pyi", ".pyw")


@dataclass(frozen=True)
class Change:
    """Change that a migration makes to a file.

    Attributes:
        path: Path to show in the output, relative to the working directory if the file is inside it.
    """

    file: Path
    path: str
    old: bytes
    new: bytes

    def format_diff(self) -> bytes:
        """Return a unified diff for `patch -p1` and `git apply`, in the file's own encoding."""
        path = os.fsencode(self.path.replace(os.sep, "/").lstrip("/"))
        old, new = _split_lines(self.old), _split_lines(self.new)
        lines = difflib.diff_bytes(difflib.unified_diff, old, new, b"a/" + path, b"b/" + path)
        return b"".join(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines)

    def write(self) -> None:
        """Replace the file atomically, and keep its mode and, as far as permitted, its owner."""
        target = Path(os.path.realpath(self.file))
        status = target.stat()

        def write_part(part: str) -> None:
            Path(part).touch(0o600)  # nobody else may read it before it has the mode of the file
            Path(part).write_bytes(self.new)
            with suppress(PermissionError):
                os.chown(part, status.st_uid, status.st_gid)
            os.chmod(part, status.st_mode & 0o7777)

        write_atomically(target, write_part)


@dataclass
class Migration:
    """Changes and findings of a migration.

    Attributes:
        findings: Places that require manual attention.
        count: The number of files examined.
    """

    changes: list[Change] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    count: int = 0


def migrate_project(path: str | Path) -> Migration:
    """Compute the migration of a file or folder without writing any file."""
    migration = Migration()
    for file in _list_files(Path(path), migration.findings):
        shown = _shorten(file)
        migration.count += 1
        try:
            change, findings = _migrate_file(file, shown)
        except SyntaxError as error:
            text = f"does not parse and is unchanged: {error.msg}"
            migration.findings.append(Finding(shown, error.lineno or 0, text))
            continue
        except (ValueError, RecursionError, MemoryError, OSError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            migration.findings.append(Finding(shown, 0, f"{_UNREADABLE}: {reason}"))
            continue
        migration.findings += findings
        if change is not None:
            migration.changes.append(change)
    migration.findings.sort()
    return migration


def _list_files(path: Path, findings: list[Finding]) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return

    def report(error: OSError) -> None:
        shown = _shorten(Path(os.fsdecode(error.filename)))
        findings.append(Finding(shown, 0, f"{_UNREADABLE}: {error.strerror}"))

    for folder, folders, names in os.walk(path, onerror=report):
        folders[:] = sorted(name for name in folders if not _is_skipped(Path(folder, name)))
        for file in (Path(folder, name) for name in sorted(names) if _choose(name) is not None):
            try:
                status = os.lstat(file)
                is_data = _choose(file.name) is migrate_text and status.st_size > _LARGEST_TEXT
                if stat.S_ISREG(status.st_mode) and not is_data:
                    yield file
            except OSError as error:
                report(error)


def _is_skipped(folder: Path) -> bool:
    """Return whether a folder is skipped, because it does not contain the project's own files."""
    is_environment = any(os.path.exists(folder / name) for name in ("pyvenv.cfg", "conda-meta"))
    return folder.name.startswith(".") or folder.name in (*_SKIPPED, *_RECORDS) or is_environment


def _choose(name: str) -> Callable[[str, str], tuple[str, list[Finding]]] | None:
    suffix = os.path.splitext(name)[1]
    if suffix in _PYTHON:
        return migrate_source
    if suffix == ".ipynb":
        return migrate_notebook
    return migrate_text if is_text(name) else None


def _migrate_file(file: Path, shown: str) -> tuple[Change | None, list[Finding]]:
    raw = file.read_bytes()
    migrate = _choose(file.name) or migrate_source
    if not mentions_peer(raw.decode("latin-1")):
        return None, []
    encoding = "utf-8"
    if migrate is migrate_source:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    old = raw.decode(encoding)
    new, findings = migrate(old, shown)
    if file.name == "setup.py":
        findings = findings + find_requirements(old, shown)
    return (None if new == old else Change(file, shown, raw, new.encode(encoding))), findings


def _split_lines(raw: bytes) -> list[bytes]:
    """Split bytes into lines at line feeds only, as `patch` does, and keep the line feeds."""
    return [line for line in re.split(rb"(?<=\n)", raw) if line]


def _shorten(file: Path) -> str:
    relative = os.path.relpath(file)
    return str(file) if relative.startswith(os.pardir) else relative
