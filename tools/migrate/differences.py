"""Findings of a migration, and detection of code that behaves differently, according to ``compat/differences.toml``."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, order=True)
class Finding:
    """Place in a project that requires manual attention.

    Attributes:
        path: The file's path, as shown in the output. For a cell of a notebook, it ends with the cell's number.
        line: The line number in the file or cell, from 1; 0 for the whole file.
        must_change: Whether the program must be changed. If False, the program runs, but behaves differently.
    """

    path: str
    line: int
    text: str
    must_change: bool = True

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}" if self.line else f"{self.path}: {self.text}"


# Forms: Trainer, Trainer(flag), Trainer(flag="value"), .method, .method(flag), def hook, torch.load.
_SIGN = re.compile(r"(?P<name>(?:def )?\.?\w+(?:\.\w+)?)(?:\((?P<keyword>\w+)(?:=(?P<value>.+))?\))?")


@dataclass(frozen=True)
class Usage:
    """Use of a peer's name or method in a program.

    Attributes:
        name: A peer's name, or ``.name`` for a call of a method on any object, ``def name`` for the definition of a
            method, or ``module.name`` for a call in this form.
        keywords: The keyword arguments of a call, by name; empty for other uses.
        node: The expression that refers to the name; None for imports, calls and definitions.
    """

    line: int
    name: str
    keywords: Mapping[str, ast.expr] = field(default_factory=dict)
    node: ast.expr | None = None


def list_differences(usages: Iterable[Usage]) -> Iterator[tuple[int, str, bool]]:
    """Yield the line and text of each difference in behavior, and whether it requires a change of the program."""
    told: set[str] = set()
    for usage in sorted(usages, key=lambda usage: usage.line):
        for sign, row in _read_signs().get(usage.name, ()):
            used = sign["name"] + (f"({sign['keyword']}=...)" if sign["keyword"] else "")
            is_told = used in told and sign["keyword"] is None and not row["must_change"]
            if _applies(sign, usage) and not is_told:
                told.add(used)
                yield usage.line, f"{used}: {row['case']}: {row['says']}", row["must_change"]


def _applies(sign: re.Match[str], usage: Usage) -> bool:
    if sign["keyword"] is None:
        return "." in usage.name or usage.name.startswith("def ") or not usage.keywords
    value = usage.keywords.get(sign["keyword"])
    if value is None:
        return False
    return sign["value"] is None or ast.unparse(value) == ast.unparse(ast.parse(sign["value"], mode="eval").body)


@cache
def _read_signs() -> Mapping[str, list[tuple[re.Match[str], Mapping[str, Any]]]]:
    rows = tomllib.loads(files("treadle.compat").joinpath("differences.toml").read_text(encoding="utf-8"))["rows"]
    signs: dict[str, list[tuple[re.Match[str], Mapping[str, Any]]]] = {}
    for row in rows:
        for text in row["used"]:
            sign = _SIGN.fullmatch(text)
            if sign is None:
                raise ValueError(
                    f"differences.toml: {text!r} must have the form 'name', 'name(flag)', '.method', 'module.name' or "
                    "'def hook'."
                )
            signs.setdefault(sign["name"], []).append((sign, row))
    return signs
