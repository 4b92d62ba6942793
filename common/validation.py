"""Checks of arguments, made where they are given, so that the traceback ends at the line that is wrong.

Each returns the value it was given, and its error states the argument, the value and the rule.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

from .messages import nearest


def check_bool(name: str, value: Any) -> bool:
    """Accept True and False; anything else, the string ``"False"`` say, would pass for one of them.

    Raises:
        TypeError: for any other value.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False, not a {type(value).__name__}.")
    return value


def check_bool_or_word(name: str, value: Any, words: Iterable[str]) -> bool:
    """Accept True, False, and words that mean True.

    Raises:
        ValueError: for any other value; names the nearest word.
    """
    words = list(words)
    if isinstance(value, bool) or (isinstance(value, str) and value in words):
        return bool(value)
    valid = " or ".join(["True, False", *map(repr, words)])
    raise ValueError(f"{name}={value!r} must be {valid}.{nearest(str(value), words)}")


def check_int(name: str, value: Any, low: int, meaning: str = "") -> int:
    """Accept integers of at least ``low``, but not True and False.

    Args:
        name: the argument.
        value: its value.
        low: the least value.
        meaning: what the least value stands for, such as ``"means never"``.

    Raises:
        ValueError: for any other value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        meaning = f", which {meaning}" if meaning else ""
        raise ValueError(f"{name}={value!r} must be a whole number of at least {low}{meaning}.")
    return value


def check_number(name: str, value: Any, low: float = -math.inf) -> float:
    """Accept integers and floats of at least ``low``, but not NaN, with which every comparison is False.

    Raises:
        TypeError: for any other type.
        ValueError: for NaN, and for a smaller number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} must be a number, not a {type(value).__name__}.")
    if not value >= low:
        raise ValueError(f"{name}={value!r} must be a number" + (f" of at least {low:g}." if low > -math.inf else "."))
    return value


def check_positive(name: str, value: Any, otherwise: str = "") -> float:
    """Accept integers and floats above zero.

    Args:
        name: the argument.
        value: its value.
        otherwise: what else the argument may be, such as ``"or None to leave it off"``.

    Raises:
        ValueError: for any other value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name}={value!r} must be a number above 0{otherwise and f', {otherwise}'}.")
    return value


def check_text(name: str, value: Any) -> str:
    """Accept strings.

    Raises:
        TypeError: for any other type.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a string, not a {type(value).__name__}.")
    return value


def check_path(name: str, value: Any) -> str:
    """Accept paths, and return them as strings.

    Raises:
        TypeError: for any other type.
    """
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name}={value!r} must be a path, not a {type(value).__name__}.")
    return os.fspath(value)


def check_monitor(value: Any) -> str:
    """Accept the name of a logged value.

    Raises:
        TypeError: for anything but a string.
        ValueError: for an empty string.
    """
    if not isinstance(value, str):
        raise TypeError(f"monitor={value!r} must be the name of a logged value, such as 'val_loss'.")
    if not value:
        raise ValueError("monitor='' must be the name of a logged value, such as 'val_loss'.")
    return value


def choose(name: str, value: object, choices: Iterable[str]) -> str:
    """Accept one of several strings.

    Raises:
        ValueError: for any other value; lists the choices and names the nearest one.
    """
    choices = list(choices)
    if isinstance(value, str) and value in choices:
        return value
    raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}.{nearest(str(value), choices)}")
