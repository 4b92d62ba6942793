"""Findings that a migration reports besides its edits."""

from __future__ import annotations

from dataclasses import dataclass


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
