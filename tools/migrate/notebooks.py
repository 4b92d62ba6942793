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
    sources = {}
    for number, (_, magics), part in zip(cells, hidden, parts, strict=True):
        new = _show_magics(part, magics)
        if new != _join(cells[number]):
            sources[number] = new
    lengths = {number: source.count("\n") + 2 for number, (source, _) in zip(cells, hidden, strict=True)}
    return _replace_sources(text, notebook, sources), [_name_cell(finding, lengths) for finding in findings]


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


def _replace_sources(text: str, notebook: Any, sources: dict[int, str]) -> str:
    """Return a notebook's text with new sources, given by cell number. The rest of the text is unchanged."""
    # JSON contains no quotes outside strings, so these are its strings, in the order of the parsed ones.
    literals = list(re.finditer(r'"(?:[^"\\]|\\.)*"', text))
    spans = dict(_locate_sources(notebook))
    for number, source in sorted(sources.items(), reverse=True):
        start, count = spans[number]
        old = literals[start : start + count]
        raw = {json.loads(literal[0]): literal[0] for literal in old}
        if "".join(json.loads(literal[0]) for literal in old) != _join(notebook["cells"][number - 1]):
            raise ValueError(f"a key appears twice in cell {number}")
        is_list = isinstance(notebook["cells"][number - 1]["source"], list)
        lines = source.splitlines(keepends=True) if is_list else [source]
        lead = re.search(r"\s*$", text[: old[0].start()])
        between = text[old[0].end() : old[1].start()] if count > 1 else f",{lead[0] if lead else ''}"
        new = between.join(raw.get(line) or json.dumps(line, ensure_ascii=text.isascii()) for line in lines)
        text = text[: old[0].start()] + new + text[old[-1].end() :]
    return text


def _locate_sources(notebook: Any) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield each cell's number, with the index of its source's first string and the number of the source's strings.

    The index counts all strings in the notebook, including keys.
    """
    position = 0
    for key, value in notebook.items():
        position += 1
        if key != "cells":
            position += _count_strings(value)
            continue
        for number, cell in enumerate(value, 1):
            for name, part in cell.items():
                position += 1
                if name == "source":
                    yield number, (position, _count_strings(part))
                position += _count_strings(part)


def _count_strings(value: Any) -> int:
    if isinstance(value, dict):
        return sum(1 + _count_strings(part) for part in value.values())
    return sum(map(_count_strings, value)) if isinstance(value, list) else int(isinstance(value, str))
