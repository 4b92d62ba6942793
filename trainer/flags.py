"""Flags that come in several forms, checked and made into one."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch

Limit = int | float | None


def check_limit(name: str, value: Limit) -> int | float:
    """A share of an epoch (float from 0 to 1) or a number of batches (int).

    Raises:
        ValueError, TypeError: names the flag, the value and the rule.
    """
    rule = "it must be a whole number of batches of at least 0, or a share of the epoch from 0.0 to 1.0"
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: {rule}.")
    if not value >= 0 or (isinstance(value, float) and value > 1.0):
        raise ValueError(f"{name}={value!r}: {rule}.")
    return value


def limited(name: str, limit: int | float, total: int | None) -> int | None:
    """How many of ``total`` batches a checked limit lets through; None for all of them.

    Raises:
        ValueError: for a share of a loader that has no length.
    """
    if isinstance(limit, int):
        return limit if total is None or limit < total else None
    if limit == 1.0:
        return None
    if total is None and limit > 0:
        raise ValueError(f"{name}={limit} is a share, but the loader has no length: give a whole number of batches.")
    count = int((total or 0) * limit)
    if limit > 0 and not count:
        raise ValueError(f"{name}={limit} of {total} batches is less than one: give at least {1 / (total or 1):.3g}.")
    return count


def seconds(name: str, value: str | timedelta | dict[str, int] | None) -> float | None:
    """A duration as seconds: ``"DD:HH:MM:SS"``, a timedelta, or its arguments as a dict.

    Raises:
        ValueError: for a string of another form, or no time at all.
        TypeError: for anything else.
    """
    rule = "must be 'DD:HH:MM:SS', a timedelta or a dict of its arguments"
    if value is None:
        return None
    if isinstance(value, str):
        parts = value.split(":")
        if len(parts) != 4 or not all(part.strip().isdigit() for part in parts):
            raise ValueError(f"{name}={value!r} must be 'DD:HH:MM:SS', for example '00:12:00:00' for twelve hours.")
        days, hours, minutes, secs = map(int, parts)
        value = timedelta(days=days, hours=hours, minutes=minutes, seconds=secs)
    elif isinstance(value, dict):
        try:
            value = timedelta(**value)
        except TypeError as error:
            raise TypeError(f"{name}={value!r} {rule} (days, hours, minutes, seconds, ...): {error}.") from None
    if not isinstance(value, timedelta):
        raise TypeError(f"{name}={value!r} {rule}.")
    if value <= timedelta(0):
        raise ValueError(f"{name}={value!r} must be more than no time.")
    return value.total_seconds()


def check_switch(name: str, value: Any) -> bool:
    """True or False: any other value, the string ``"False"`` say, would be taken for one of them.

    Raises:
        TypeError: names the flag and the value.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False, not a {type(value).__name__}.")
    return value


def check_bounds(what: str, low: int, high: int) -> None:
    """``min_<what>`` may not be more than ``max_<what>``, where -1 is no limit.

    Raises:
        ValueError: names both.
    """
    if 0 <= high < low:
        raise ValueError(f"min_{what}={low} is more than max_{what}={high}: raise one or lower the other.")


def check_directory(name: str, value: Any) -> str:
    """A path; the working directory for None.

    Raises:
        TypeError: names the flag and the value.
    """
    if value is not None and not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name}={value!r} must be a path, not a {type(value).__name__}.")
    return os.fspath(os.getcwd() if value is None else value)


def check_count(name: str, value: Any, low: int) -> int:
    """A whole number of at least ``low``.

    Raises:
        ValueError: names the flag, the value and the rule.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {low}.")
    return value


def check_batches(name: str, value: int | bool) -> int:
    """A whole number of batches; True is one, False none."""
    return int(value) if isinstance(value, bool) else check_count(name, value, 0)


def check_interval(name: str, value: int | float | None) -> int | float:
    """As `check_limit`, but more than zero.

    Raises:
        ValueError: names the flag, the value and the rule.
    """
    if value is not None and not value:
        raise ValueError(f"{name}={value!r} must be more than 0; limit_val_batches=0 turns validation off.")
    return check_limit(name, value)


def check_epochs(name: str, value: int | None, interval: int | float) -> int | None:
    """A whole number of epochs, or None to count across them, which takes an interval in batches.

    Raises:
        ValueError: names the flag, the value and the rule.
    """
    if value is not None:
        return check_count(name, value, 1)
    if isinstance(interval, int):
        return None
    raise ValueError(
        f"{name}=None counts batches across epochs, but val_check_interval={interval} is a share of one: give "
        "val_check_interval a whole number of batches."
    )


def check_positive(name: str, value: float | None) -> float | None:
    """A number above zero, or None.

    Raises:
        ValueError: names the flag, the value and the rule.
    """
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(f"{name}={value!r} must be a number above 0, or None to leave it off.")


def set_determinism(deterministic: bool | str | None, benchmark: bool | None) -> None:
    """Set torch's switches; they are the whole process's, and None leaves them alone.

    Raises:
        ValueError: for a value that is neither a bool nor ``"warn"``.
    """
    if deterministic not in (None, True, False, "warn"):
        raise ValueError(f"deterministic={deterministic!r} must be True, False or 'warn'.")
    if benchmark is not None:
        check_switch("benchmark", benchmark)
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when its handle is made
    if benchmark is not None or deterministic:
        torch.backends.cudnn.benchmark = bool(benchmark)
