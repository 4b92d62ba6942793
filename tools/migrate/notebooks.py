"""Migration of a notebook's code cells, which are migrated as one program."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from .differences import Finding
from .python_source import migrate_source

_MAGIC = re.compile(r"\s*(?:[%!?]|[\w, ]+=\s*[%!]|[\w.]+\?{1,2}\s*$)")
_OTHER_LANGUAGE = re.compile(r"\s*%%(?!time|timeit|capture|prun)\w+")

_END = "@treadle-end-of-cell-"
_HIDDEN = "pass  #@treadle-magic-"


def migrate_notebook(text: str, path: str) -> tuple[str, list[Finding]]:
    """Return a notebook's text after the migration, and the findings.

    The path of a finding ends with the cell's number, and its line is counted within the cell.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: If the file or its code cannot be parsed.
    """
    notebook = json.loads(text)
    cells = {number: cell for number, cell in _list_cells(notebook) if not _OTHER_LANGUAGE.match(_join(cell))}
    hidden = [_hide_magics(_join(cell)) for cell in cells.values()]
    for number, (source, _) in zip(cells, hidden, strict=True):
        _check_syntax(source, number)
    program = "".join(f"{source}\n#{_END}{index}\n" for index, (source, _) in enumerate(hidden))
    program, findings = migrate_source(program, path)
    parts = re.split(rf"\n#{_END}\d+\n", program)[:-1]
    is_changed = False
    for cell, (_, magics), part in zip(cells.values(), hidden, parts, strict=True):
        source = _show_magics(part, magics)
        if source != _join(cell):
            is_changed = True
            cell["source"] = source.splitlines(keepends=True) if isinstance(cell["source"], list) else source
    lengths = {number: source.count("\n") + 2 for number, (source, _) in zip(cells, hidden, strict=True)}
    return _dump(notebook, text) if is_changed else text, [_name_cell(finding, lengths) for finding in findings]


def _list_cells(notebook: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the code cells, each with its number among all cells."""
    cells = notebook.get("cells", []) if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise ValueError("it is JSON, but not a notebook")
    for number, cell in enumerate(cells, 1):
        if cell.get("cell_type") == "code" and "source" in cell:
            lines = cell["source"] if isinstance(cell["source"], list) else [cell["source"]]
            if not all(isinstance(line, str) for line in lines):
                raise ValueError(f"the source of cell {number} is neither a string nor a list of strings")
            yield number, cell


def _join(cell: dict[str, Any]) -> str:
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


def _hide_magics(source: str) -> tuple[str, list[str]]:
    """Replace IPython magics with ``pass`` statements. Return the code and the magics. Valid Python is unchanged."""
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
    """Return a copy of the finding with the notebook cell in its path and a line number relative to that cell."""
    line = finding.line
    for number, length in lengths.items():
        if line <= length:
            return replace(finding, line=line, path=f"{finding.path}:cell {number}")
        line -= length
    return finding


def _dump(notebook: Any, text: str) -> str:
    """Return a notebook as JSON, formatted like ``text``: Jupyter indents by one space and Colab by two."""
    indent = re.match(r"\{\r?\n( +)", text)
    dumped = json.dumps(notebook, ensure_ascii=text.isascii(), indent=len(indent[1]) if indent else None)
    return dumped + text[len(text.rstrip()) :]
