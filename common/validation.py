"""Argument checks."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable
from typing import Any

from .messages import join_words, name_type, nearest

Limit = int | float | None
"""Number (int) or fraction (float) of batches; None stands for all."""


class WrongTypeError(TypeError, ValueError):
    """Error about a value whose type is wrong, also caught as the ValueError that Lightning's scripts expect."""


def check_bool(name: str, value: Any) -> bool:
    """Return the value if it is True or False.

    Args:
        name: Name of the argument, for the error.
        value: Value to check.

    Raises:
        TypeError: If the value is not a bool.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False, not {name_type(value)}.")
    return value


def parse_truth(name: str, value: str) -> bool:
    """Return whether a word, such as the value of an environment variable, means True.

    Args:
        name: Name of the variable, for the error.
        value: Word, of any case.

    Raises:
        ValueError: If the word means neither True nor False.
    """
    true, false = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")
    if value.lower() not in true + false:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(true + false)}.")
    return value.lower() in true


def check_bool_or_word(name: str, value: Any, words: Collection[str]) -> bool:
    """Return True for True and for words that mean True, and False for False.

    Args:
        name: Name of the argument, for the error.
        value: Value to check.
        words: Words that mean True.

    Raises:
        ValueError: If the value is neither a bool nor one of the words.
    """
    if isinstance(value, bool) or (isinstance(value, str) and value in words):
        return bool(value)
    valid = join_words(["True", "False", *map(repr, words)])
    raise ValueError(f"{name}={value!r} must be {valid}.{nearest(str(value), words)}")


def check_int(name: str, value: Any, low: int, meaning: str = "") -> int:
    """Return the value if it is an integer of at least ``low``; True and False are rejected.

    Args:
        name: Name of the argument, for the error.
        value: Value to check.
        low: Minimum value.
        meaning: Meaning of the minimum value, such as ``"means never"``. Default: none.

    Raises:
        ValueError: If the value is invalid.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        meaning = f" ({low} {meaning})" if meaning else ""
        raise ValueError(f"{name}={value!r} must be an integer of at least {low}{meaning}.")
    return value


def check_number(name: str, value: Any, low: float = -math.inf) -> float:
    """Return the value if it is an integer or float of at least ``low``. NaN is rejected.

    Args:
        name: Name of the argument, for the error.
        value: Value to check.
        low: Minimum value. Default: no minimum.

    Raises:
        TypeError: If the value has another type.
        ValueError: If the value is NaN or less than ``low``.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} must be a number, not {name_type(value)}.")
    if not value >= low:
        raise ValueError(f"{name}={value!r} must be a number" + (f" of at least {low:g}." if low > -math.inf else "."))
    return value


def check_positive(name: str, value: Any, otherwise: str = "") -> float:
    """Return the value if it is an integer or float above zero.

    Args:
        name: Name of the argument, for the error.
        value: Value to check.
        otherwise: Alternative to a number, such as ``"or None to leave it off"``. Default: none.

    Raises:
        ValueError: If the value is not a number above zero.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name}={value!r} must be a number above 0{otherwise and f', {otherwise}'}.")
    return value


def check_text(name: str, value: Any) -> str:
    """Return the value if it is a string; otherwise, raise a TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a string, not {name_type(value)}.")
    return value


def check_path(name: str, value: Any) -> str:
    """Return a path as a string; raise a TypeError for any other value."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name}={value!r} must be a path, not {name_type(value)}.")
    return os.fspath(value)


def check_optional_type(name: str, value: Any, kind: type) -> None:
    """Raise a TypeError unless an argument is None or an object of a class."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(
            f"{name} is {name_type(value)}, but must be a {kind.__name__}. Pass {name}={kind.__name__}(...)."
        )


def check_monitor(value: Any) -> str:
    """Return the value if it can be the name of a logged value, that is, a non-empty string.

    Args:
        value: Value of the argument ``monitor``.

    Raises:
        TypeError: If the value is not a string.
        ValueError: If the string is empty.
    """
    if not isinstance(value, str):
        raise TypeError(f"monitor={value!r} must be the name of a logged value, such as 'val_loss'.")
    if not value:
        raise ValueError("monitor='' must be the name of a logged value, such as 'val_loss'.")
    return value


def choose(name: str, value: object, choices: Iterable[str]) -> str:
    """Return the value if it is one of several strings.

    Args:
        name: Name of the argument, for the error.
        value: Value to check.
        choices: Valid strings.

    Raises:
        ValueError: If the value is not one of ``choices``.
    """
    choices = list(choices)
    if isinstance(value, str) and value in choices:
        return value
    if len(choices) == 1:
        raise ValueError(f"{name}={value!r} must be {choices[0]!r}.")
    raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}.{nearest(str(value), choices)}")
