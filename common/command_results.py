"""Results and errors of commands: text for people or, with ``--json``, one JSON object on standard output."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from .messages import make_printable, print_unless_closed

CODES: Sequence[tuple[type[BaseException], str]] = (
    (ModuleNotFoundError, "missing_package"),
    (OSError, "file_error"),
    (KeyboardInterrupt, "interrupted"),
    (ValueError, "invalid_argument"),
)
"""Codes of errors that a command reports, by the first type that matches. Other errors have the code ``exception``."""

_json_stdout: TextIO | None = None


@contextmanager
def as_json(program: str) -> Iterator[None]:
    """Within a ``with`` block, print results as JSON, and all other output of this process to standard error."""
    global _json_stdout
    _json_stdout = sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    except Exception as error:
        fail(program, error, code="exception", is_printed=True)  # with its traceback, by Python
        raise
    finally:
        _json_stdout = None


def report(text: str | None, result: Any = None) -> None:
    """Print the result of a command.

    Args:
        text: The text for people; None if they have seen it. It is also printed if there is no ``result``.
        result: Value that stands for the result in JSON. With several ranks, only rank zero prints it.
    """
    if _json_stdout is not None and result is not None:
        text = None if os.environ.get("RANK", "0") != "0" else json.dumps(_make_valid(result), indent=2)
    if text is not None:
        with redirect_stdout(_json_stdout or sys.stdout):
            print_unless_closed(text)


def fail(
    program: str, error: BaseException, status: int = 2, *, code: str | None = None, is_printed: bool = False
) -> int:
    """Print an error that ends a command, and return its exit status.

    Args:
        program: The command, such as ``"treadle export"``.
        error: The error. Its attribute ``problems``, if it has one, lists the messages in it.
        status: The exit status. Default: 2.
        code: Code of the error in JSON. Default: the one in `CODES`.
        is_printed: Whether the text for people is already printed. Default: False.
    """
    if not is_printed:
        print("\n".join(map(make_printable, f"{program}: {error}".splitlines())), file=sys.stderr)
    if _json_stdout is not None:
        named = code or next((name for kind, name in CODES if isinstance(error, kind)), "exception")
        message = str(error) or type(error).__name__
        report(
            None, {"error": {"code": named, "message": message, "problems": [*getattr(error, "problems", [message])]}}
        )
    return status


def _make_valid(value: Any) -> Any:
    """Return a value without infinity and NaN, which JSON does not have, and with text for objects of other types."""
    if isinstance(value, Mapping):
        return {str(key): _make_valid(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_valid(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)
