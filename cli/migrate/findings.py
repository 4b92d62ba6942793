"""Findings that a migration reports besides its edits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Finding:
    """Place that needs a person's attention.

    Attributes:
        path: The file, as it is shown.
        line: The line, from 1; 0 for the whole file.
        text: The name, and what to change or consider.
        by_hand: Whether the program needs a change. Otherwise it runs, but behaves differently.
    """

    path: str
    line: int
    text: str
    by_hand: bool = True

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}" if self.line else f"{self.path}: {self.text}"
