"""Durations in the forms that users write: ``"DD:HH:MM:SS"``, a ``timedelta``, or a dict of its arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from .messages import name_type, nearest

Duration = str | timedelta | Mapping[str, float]

_UNITS = ("weeks", "days", "hours", "minutes", "seconds", "milliseconds", "microseconds")
_TEXT = re.compile(r"\s*([0-9]{1,9})\s*:\s*([0-9]{1,9})\s*:\s*([0-9]{1,9})\s*:\s*([0-9]{1,9})\s*")


def parse_duration(name: str, value: Any, zero: bool = False) -> timedelta:
    """Convert a duration to a ``timedelta``.

    Args:
        name: Name of the argument, for error messages.
        value: ``"DD:HH:MM:SS"``, a ``timedelta``, or a dict of its arguments.
        zero: Whether no time is a valid duration. Default: False.

    Raises:
        TypeError, ValueError: If the value is not a positive, finite duration in one of these forms.
    """
    if isinstance(value, str):
        numbers = _TEXT.fullmatch(value)
        if numbers is None:
            raise ValueError(
                f"{name}={value!r} must have the form DD:HH:MM:SS, such as '00:12:00:00' for twelve hours."
            )
        units: Mapping[str, Any] = dict(
            zip(("days", "hours", "minutes", "seconds"), map(int, numbers.groups()), strict=True)
        )
    elif isinstance(value, Mapping):
        units = value
        _check_units(name, units)
    elif isinstance(value, timedelta):
        units = {"days": value.days, "seconds": value.seconds, "microseconds": value.microseconds}
    else:
        raise TypeError(
            f"{name}={value!r} must be a string of the form DD:HH:MM:SS, a datetime.timedelta, or a dict of its "
            "arguments, such as {'hours': 12}."
        )
    try:
        duration = timedelta(**units)
    except (OverflowError, ValueError) as error:  # timedelta's errors for infinity and NaN
        raise ValueError(f"{name}={value!r} must be a finite duration of at most 999,999,999 days ({error}).") from None
    if duration < timedelta(0) or not (duration or zero):
        raise ValueError(f"{name}={value!r} must be a positive duration.")
    return duration


def _check_units(name: str, units: Mapping[str, Any]) -> None:
    for unit, amount in units.items():
        if unit not in _UNITS:
            raise TypeError(
                f"{name}={dict(units)!r}: {unit!r} is not an argument of datetime.timedelta. Use "
                f"{', '.join(_UNITS)}.{nearest(str(unit), _UNITS)}"
            )
        if isinstance(amount, bool) or not isinstance(amount, int | float):
            raise TypeError(f"{name}={dict(units)!r}: {unit} must be a number, not {name_type(amount)}.")
