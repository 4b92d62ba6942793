"""Arguments of callbacks, checked when they are given: what is wrong is said in the line that is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ..common.messages import nearest


def switch(name: str, value: Any) -> bool:
    """True or False: any other value, the string ``"False"`` say, would be taken for one of them.

    Raises:
        TypeError: names the argument and the value.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False, not a {type(value).__name__}.")
    return value


def whole(name: str, value: Any, low: int, means: str = "") -> int:
    """A whole number of at least ``low``, of which ``means`` says what it stands for.

    Raises:
        ValueError: names the argument, the value and the rule.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {low}{means and f', which {means}'}.")
    return value


def number(name: str, value: Any, low: float = -math.inf) -> float:
    """A number of at least ``low`` that is one: with NaN every comparison would fail in silence.

    Raises:
        TypeError: for anything else.
        ValueError: for NaN, and for less.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} must be a number, not a {type(value).__name__}.")
    if not value >= low:
        raise ValueError(f"{name}={value!r} must be a number" + (f" of at least {low:g}." if low > -math.inf else "."))
    return value


def monitor_name(value: Any) -> str:
    """The name of a logged value.

    Raises:
        TypeError: for anything but a string.
        ValueError: for an empty one.
    """
    if not isinstance(value, str):
        raise TypeError(f"monitor={value!r} must be the name of a logged value, such as 'val_loss'.")
    if not value:
        raise ValueError("monitor='' must be the name of a logged value, such as 'val_loss'.")
    return value


def switch_or_word(name: str, value: Any, words: Iterable[str]) -> bool:
    """True, False or a word that means True.

    Raises:
        ValueError: names the argument, the value, what is valid and the nearest word.
    """
    words = list(words)
    if isinstance(value, bool) or (isinstance(value, str) and value in words):
        return bool(value)
    valid = " or ".join(["True, False", *map(repr, words)])
    raise ValueError(f"{name}={value!r} must be {valid}.{nearest(str(value), words)}")
