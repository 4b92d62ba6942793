"""Migrates the code cells of a notebook, which are one program; the rest of its file stays as it is."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from .findings import Finding
from .python_source import migrate_source

_MAGIC = re.compile(r"\s*(?:[%!?]|[\w, ]+=\s*[%!]|[\w.]+\?{1,2}\s*$)")
_OTHER_LANGUAGE = re.compile(r"\s*%%(?!time|timeit|capture|prun)\w+")

_END = "@treadle-end-of-cell-"
_HIDDEN = "pass  #@treadle-magic-"


def migrate_notebook(text: str, path: str) -> tuple[str, list[Finding]]:
    """Return a notebook's text after the migration, and what a person should look at.

    Args:
        text: the file's text, JSON.
        path: the file, as findings are to name it. Their lines are counted over the notebook's code cells.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: the file or its code does not parse.
    """
    notebook = json.loads(text)
    cells = {number: cell for number, cell in _list_cells(notebook) if not _OTHER_LANGUAGE.match(_join(cell))}
    hidden = [_hide_magics(_join(cell)) for cell in cells.values()]
    for number, (source, _) in zip(cells, hidden, strict=True):
        _check_syntax(source, number)
    program = "".join(f"{source}\n#{_END}{index}\n" for index, (source, _) in enumerate(hidden))
    program, findings = migrate_source(program, path)
    parts = re.split(rf"\n#{_END}\d+\n", program)[:-1]
    for cell, (_, magics), part in zip(cells.values(), hidden, parts, strict=True):
        new = _show_magics(part, magics)
        if new != _join(cell):
            cell["source"] = new if isinstance(cell["source"], str) else new.splitlines(keepends=True)
    lengths = {number: source.count("\n") + 2 for number, (source, _) in zip(cells, hidden, strict=True)}
    return _dump(notebook, text), [_name_cell(finding, lengths) for finding in findings]


def _list_cells(notebook: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """The code cells, with their numbers among all cells."""
    cells = notebook.get("cells", []) if isinstance(notebook, dict) else []
    for number, cell in enumerate(cells, 1):
        if isinstance(cell, dict) and cell.get("cell_type") == "code" and "source" in cell:
            yield number, cell


def _join(cell: dict[str, Any]) -> str:
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


def _hide_magics(source: str) -> tuple[str, list[str]]:
    """The code with IPython's own lines as statements, and those lines. What parses has none."""
    with suppress(SyntaxError):
        ast.parse(source)
        return source, []
    lines: list[str] = []
    magics: list[str] = []
    indent, is_continued = "", False
    for line in source.split("\n"):
        if is_continued or _MAGIC.match(line):
            indent = indent if is_continued else line[: len(line) - len(line.lstrip())]
            is_continued = line.endswith("\\")
            magics.append(line)
            line = f"{indent}{_HIDDEN}{len(magics) - 1}@"
        lines.append(line)
    return "\n".join(lines), magics


def _check_syntax(source: str, number: int) -> None:
    try:
        ast.parse(source)
    except SyntaxError as error:
        raise SyntaxError(f"cell {number}, line {error.lineno}: {error.msg}") from None


def _show_magics(code: str, magics: list[str]) -> str:
    hidden = re.compile(rf"^[^\S\n]*{re.escape(_HIDDEN)}(\d+)@", re.MULTILINE)
    return hidden.sub(lambda match: magics[int(match[1])], code)


def _name_cell(finding: Finding, lengths: dict[int, int]) -> Finding:
    """The finding with the cell and the line in it, in place of the line in the whole program."""
    line = finding.line
    for number, length in lengths.items():
        if line <= length:
            return replace(finding, line=line, path=f"{finding.path}:cell {number}")
        line -= length
    return finding


def _dump(notebook: Any, text: str) -> str:
    """JSON in the form of the old text: its indentation, its letters, its end."""
    end = text[len(text.rstrip()) :]
    for ascii_only in (False, True):
        for indent in (1, 2, 4, None, "\t"):
            for separators in (None, (",", ":")):
                options = {"indent": indent, "ensure_ascii": ascii_only, "separators": separators}
                if json.dumps(json.loads(text), **options) + end == text:
                    return json.dumps(notebook, **options) + end
    return json.dumps(notebook, indent=1, ensure_ascii=False) + (end or "\n")
