"""What a migration reports besides its edits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Finding:
    """A place that a person should look at.

    Attributes:
        path: the file, as it is shown.
        line: counted from 1; 0 for the file as a whole.
        text: the name, and what to do or to know about it.
        by_hand: whether the program needs a change. Otherwise it runs, and behaves in another way.
    """

    path: str
    line: int
    text: str
    by_hand: bool = True

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}" if self.line else f"{self.path}: {self.text}"
