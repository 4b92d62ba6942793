"""Messages to the user: the ``treadle`` logger, warnings, suggestions of names, and formatting of counts and lists."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import TextIO


class _StandardError(logging.StreamHandler[TextIO]):
    """Handler that writes to the current ``sys.stderr``, which notebooks and tests may replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore the error, because standard error may be closed or full. Training continues."""


# Packages that call the user's program.
_FRAMEWORK = (__name__.partition(".")[0], "concurrent", "contextlib", "threading", "torch")

logger = logging.getLogger("treadle")
if not logger.handlers:
    # The usual output of a library at a terminal; `logging.getLogger("treadle").setLevel(...)` silences it.
    logger.addHandler(_StandardError())
    logger.setLevel(logging.INFO)
    logger.propagate = False


# Importing the package of `rank_zero` takes 0.1 s, which commands without messages save.
def announce(text: str) -> None:
    """Log a message through the ``treadle`` logger, on rank zero only.

    Args:
        text: The message, logged with level ``INFO``.
    """
    from .rank_zero import rank_zero_only

    if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
        # A metric's name may contain half of a surrogate pair, which no stream can write.
        logger.info(text.encode("utf-8", "backslashreplace").decode("utf-8"))


def warn(text: str) -> None:
    """Warn on rank zero only, and name the line of the user's program that led to the warning, if there is one.

    Args:
        text: Text of the warning.
    """
    from .rank_zero import rank_zero_warn

    rank_zero_warn(text, stacklevel=4 + _count_frames_to_user())  # the frame of this function is the 4th


def _count_frames_to_user() -> int:
    """Return the position of the innermost frame of the user's program, counted from the caller of `warn` as 1."""
    frame, count = sys._getframe(2), 1
    while frame.f_globals.get("__name__", "").partition(".")[0] in _FRAMEWORK:
        if frame.f_back is None:  # in one of the framework's threads
            return 1
        frame, count = frame.f_back, count + 1
    return count


def write_stderr(text: str) -> None:
    """Write lines to the standard error of the process, from a signal handler or a thread, on any rank.

    The lines do not pass through ``sys.stderr``, because the main thread may hold its lock.
    """
    with contextlib.suppress(OSError):
        os.write(2, "".join(f"treadle: {line}\n" for line in text.splitlines()).encode())


def make_printable(text: str) -> str:
    """Replace tabs by spaces and other unprintable characters by ``?``, so that untrusted text is safe to print."""
    return "".join(letter if letter.isprintable() else "?" for letter in text.replace("\t", "    "))


def print_unless_closed(text: str) -> None:
    """Print and flush text. If its reader has closed the output, as `head` does, discard this and all later output."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def closest_name(name: object, valid: Iterable[object], cutoff: float = 0.5) -> str | None:
    """Return the valid name closest to ``name``, or None if none is close.

    Case is ignored unless two valid names differ only in case. Of equally close names, the first is returned, or the
    first with the same initial.
    """
    by_lower: dict[str, list[str]] = {}
    for candidate in map(str, valid):
        by_lower.setdefault(candidate.lower(), []).append(candidate)
    lowered = str(name).lower()
    close = get_close_matches(lowered, by_lower, n=3, cutoff=cutoff)
    if not close:
        return None
    in_order = [candidate for candidate in by_lower if candidate in close]
    closest = max(in_order, key=lambda c: (SequenceMatcher(None, c, lowered).ratio(), c[:1] == lowered[:1]))
    return max(by_lower[closest], key=lambda candidate: SequenceMatcher(None, str(name), candidate).ratio())


def nearest(name: object, valid: Iterable[object]) -> str:
    """Return ``" Did you mean 'x'?"`` for the valid name closest to ``name``, or ``""`` if none is close.

    Args:
        name: Name that the user wrote.
        valid: Names to choose from.
    """
    close = closest_name(name, valid)
    return "" if close is None else f" Did you mean {close!r}?"


def abbreviate(items: Collection[object], most: int = 8, separator: str = ", ") -> str:
    """Return the first items as text, and the number of omitted ones: ``"a, b and 3 more"``.

    Args:
        items: The items to list.
        most: Number of items to show. Default: 8.
        separator: Text between two items. Default: ``", "``.
    """
    shown = separator.join(map(str, itertools.islice(items, most)))
    return shown + (f"{separator.lstrip(',')}and {len(items) - most} more" if len(items) > most else "")


def name_type(value: object) -> str:
    """Return the type of a value with its article: ``"an int"``, ``"a dict"``; None is ``"None"``.

    Args:
        value: Any value.
    """
    return "None" if value is None else add_article(type(value).__name__)


def read_text(error: BaseException) -> str:
    """Return ``str(error)``, or a replacement if this raises an error, which would hide the original one."""
    try:
        return str(error)
    except Exception as second:
        return f"<its __str__ raised {type(second).__name__}>"


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an error: ``"ValueError: lr must be positive"``."""
    return f"{type(error).__name__}: {read_text(error)}"


def add_article(noun: str) -> str:
    """Return a noun with its indefinite article: ``"an int"``, ``"a dict"``."""
    return f"{'an' if noun[0] in 'aeioAEIO' else 'a'} {noun}"


def format_count(number: int, noun: str) -> str:
    """Format a number with its noun, such as ``1 trial``, ``1,024 trials`` or ``2 processes``.

    Args:
        number: The count. A comma separates thousands.
        noun: The noun in the singular. Its plural must end in ``es`` after ``s`` or ``tch``, and otherwise add only
            ``s``.
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith(("s", "tch")) else "s")


def join_words(words: list[str], last: str = "or") -> str:
    """Join words with commas and a conjunction, such as ``a``, ``a or b`` or ``a, b or c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def named_ranks(ranks: list[int]) -> str:
    """Format ranks as ``rank 3`` or ``ranks 0-2, 5``.

    Args:
        ranks: At least one rank, in ascending order.
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return f"rank{'s' * (len(ranks) > 1)} {', '.join('-'.join(map(str, span)) for span in spans)}"


def group_ranks(texts: Mapping[int, str]) -> dict[str, str]:
    """Return the ranks that have each distinct text, as in ``{"waits": "ranks 0-2"}``.

    Args:
        texts: Text of each rank.
    """
    ranks_by_text: dict[str, list[int]] = {}
    for rank in sorted(texts):
        ranks_by_text.setdefault(texts[rank], []).append(rank)
    return {text: named_ranks(ranks) for text, ranks in ranks_by_text.items()}
