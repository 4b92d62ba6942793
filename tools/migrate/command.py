"""`treadle migrate`: migration of the imports of a project that uses Lightning, Fabric or Accelerate."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ...cli.commands import CommandParser
from ...common.command_results import fail, report
from ...common.messages import format_count
from ...common.optional import require

if TYPE_CHECKING:
    from . import Finding, Migration

SUMMARY = "rewrite the imports of a project that uses Lightning, Fabric or Accelerate"
DESCRIPTION = """\
Rewrite a project's imports of lightning, pytorch_lightning, lightning_fabric and accelerate, and the code
that uses them: lightning.pytorch.X becomes treadle.X or treadle.compat.X. The rest of each file is left unchanged.

    treadle migrate .                   print what would change, as a diff
    treadle migrate src/train.py        the same for a single file
    treadle migrate . --write           change the files

Covers Python files, code cells of notebooks, and class paths in configurations. Skips hidden folders, virtual
environments and symbolic links. Lists, by file and line, what has no counterpart and what behaves differently. Exits
with status 1 if something needs a manual change."""

NEEDS_MANUAL_CHANGE = "Needs a manual change"
DIFFERS = "Runs, but behaves differently (docs/differences)"


def build_parser(program: str = "treadle migrate") -> CommandParser:
    """Return the argument parser of `treadle migrate`. It raises a ValueError for an invalid command line."""
    parser = CommandParser(program, DESCRIPTION)
    parser.add_argument("path", help="a folder, or a file")
    parser.add_argument("--write", action="store_true", help="change the files (default: print a diff)")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run `treadle migrate` and return the exit status: 1 if manual changes are required, 2 after an error, else 0."""
    try:
        options = build_parser().parse_args(arguments)
        path = Path(options.path)
        if not path.is_dir() and not path.is_file():
            state = "is neither a folder nor a file" if path.exists() else "does not exist"
            raise ValueError(f"{options.path!r} {state}. Pass a project folder or a file in it.")
        require("treadle migrate", "libcst", extra="migrate")
        from . import migrate_project

        migration = migrate_project(options.path)
        for change in migration.changes:
            if options.write:
                change.write()
            elif not options.json:
                _print_bytes(change.format_diff())
    except (ValueError, OSError, ModuleNotFoundError) as error:
        return fail("treadle migrate", error)
    if options.json:
        report(None, _describe(migration, options.write))
    else:
        _print(format_summary(migration, options.write), end="")
    return int(any(finding.must_change for finding in migration.findings))


def _describe(migration: Migration, is_written: bool) -> dict[str, Any]:
    diffs = [(change.path, change.format_diff().decode("utf-8", "replace")) for change in migration.changes]
    return {
        "files": migration.count,
        "written": is_written,
        "changes": [{"path": path, "diff": diff} for path, diff in diffs],
        "findings": [asdict(finding) for finding in migration.findings],
    }


def format_summary(migration: Migration, is_written: bool) -> str:
    """Format the findings as text whose last line counts the changed files."""
    must_change = [finding for finding in migration.findings if finding.must_change]
    differs = [finding for finding in migration.findings if not finding.must_change]
    count = len(migration.changes)
    numbers = f"{count} of {format_count(migration.count, 'file')} {'changed' if is_written else 'would change'}"
    if count and not is_written:
        numbers += f"; --write changes {'it' if count == 1 else 'them'}"
    return _format_list(NEEDS_MANUAL_CHANGE, must_change) + _format_list(DIFFERS, differs) + f"{numbers}.\n"


def _format_list(title: str, findings: Iterable[Finding]) -> str:
    lines = [f"  {finding}\n" for finding in findings]
    return f"{title}:\n{''.join(lines)}\n" if lines else ""


def _print(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    file = stream or sys.stdout
    # A file's name may contain characters that the terminal's encoding does not have.
    encoding = file.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=file, end=end)


def _print_bytes(raw: bytes) -> None:
    """Print a diff as raw bytes, because the files may have any encoding."""
    sys.stdout.flush()
    if hasattr(sys.stdout, "buffer"):
        sys.stdout.buffer.write(raw)
        sys.stdout.buffer.flush()
    else:  # a text-only stream that replaces the standard one
        sys.stdout.write(raw.decode("utf-8", "replace"))
