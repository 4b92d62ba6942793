"""A terminal on which progress bars are drawn, and what stands on it."""

import io
import re

import torch
from torch.utils.data import IterableDataset


def often(bar):
    """The bar, redrawn so often that a test of it is short."""
    bar._every = 0.02
    return bar


PAUSE = 0.025  # seconds of a batch: each is drawn


def screen(text):
    """The lines that stand on an endless terminal in the end, and every state that each line was in."""
    lines, states = [""], [[]]
    row = column = 0
    for part in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|[\r\n]|[^\r\n\x1b]+", text):
        if part == "\x1b[2K":
            lines[row] = ""
        elif part.startswith("\x1b") and not part.endswith("A"):
            pass  # a color, or the cursor's look
        elif part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, column
            while len(lines) <= row:
                lines.append("")
                states.append([])
        elif part in ("\x1b[A", "\x1b[1A"):
            row = max(0, row - 1)
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + part + line[column + len(part) :]
            states[row].append(lines[row].rstrip())
            column += len(part)
    return [line.rstrip() for line in lines], [state for row in states for state in row]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(6, 1, 2))


class Screen(io.StringIO):
    """Says it is a terminal; can break like one whose reader has gone, or does not read."""

    broken = None

    def isatty(self):
        return True

    def write(self, text):
        if self.broken is not None:
            raise self.broken
        return super().write(text)
